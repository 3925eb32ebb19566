//! Models as data: a [`spec::DecoderSpec`] says the mathematics, a checkpoint holds the weights, and one decoder runs both.

pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod families;
pub mod rope;
pub mod spec;
pub mod weights;
