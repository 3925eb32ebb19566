//! An answer's body that keeps its request counted as live until it is sent or dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use crate::service::Live;

/// A body and the count it holds.
pub struct LiveBody {
    body: Body,
    _live: Live,
}

impl LiveBody {
    /// `body`, counted by `live`.
    pub fn new(body: Body, live: Live) -> Self {
        Self { body, _live: live }
    }
}

impl HttpBody for LiveBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
