//! Models as data: a [`spec::DecoderSpec`] says the mathematics, a checkpoint holds the weights, and one decoder runs both.

pub mod checkpoint;
pub mod config;
pub mod decoder;
mod families;
mod rope;
pub mod spec;
pub mod weights;
