//! Answers as server-sent events, or whole.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use super::error::ApiError;
use crate::service::{ChunkSink, Run};

const DONE: &[u8] = b"data: [DONE]\n\n";
const SEED: HeaderName = HeaderName::from_static("x-kwire-seed");

/// Writes chunks as events. All chunks that are ready together go out in one piece.
#[derive(Default)]
struct Events {
    buffer: BytesMut,
}

/// Writes the one chunk of a whole answer.
#[derive(Default)]
struct Whole {
    buffer: BytesMut,
}

fn write_json(buffer: &mut BytesMut, value: &impl Serialize) {
    if let Err(error) = serde_json::to_writer(buffer.writer(), value) {
        unreachable!("wire types are plain data, and memory does not fail: {error}");
    }
}

impl ChunkSink for Events {
    fn chunk(&mut self, chunk: &impl Serialize) {
        self.buffer.put_slice(b"data: ");
        write_json(&mut self.buffer, chunk);
        self.buffer.put_slice(b"\n\n");
    }
}

impl ChunkSink for Whole {
    fn chunk(&mut self, chunk: &impl Serialize) {
        write_json(&mut self.buffer, chunk);
    }
}

/// The answer to an accepted request.
pub async fn respond<R: Run>(run: R, stream: bool) -> Result<Response, ApiError> {
    let seed = HeaderValue::from(run.seed());
    let mut response = if stream {
        let mut response = Response::new(Body::from_stream(events(run)));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        response
    } else {
        let mut whole = Whole::default();
        run.collect(&mut whole).await?;
        let mut response = Response::new(Body::from(whole.buffer.freeze()));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    };
    response.headers_mut().insert(SEED, seed);
    Ok(response)
}

/// The events of a run. It is polled only when the connection takes more, so a slow client holds no more than one
/// piece here; dropping the stream drops the run, which ends the request in the engine.
fn events<R: Run>(run: R) -> impl futures::Stream<Item = Result<Bytes, std::convert::Infallible>> + Send {
    let begin = Some((run, Events::default()));
    futures::stream::unfold(begin, |state| async move {
        let (mut run, mut events) = state?;
        match run.next(&mut events).await {
            Ok(true) => Some((Ok(events.buffer.split().freeze()), Some((run, events)))),
            Ok(false) => {
                events.buffer.put_slice(DONE);
                Some((Ok(events.buffer.freeze()), None))
            }
            Err(error) => {
                tracing::warn!(%error, "a stream ended with an error");
                events.chunk(&ApiError::from(error).body());
                Some((Ok(events.buffer.freeze()), None))
            }
        }
    })
}
