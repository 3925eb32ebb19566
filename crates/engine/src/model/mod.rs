//! Models as data: a [`spec::DecoderSpec`] says the mathematics, a checkpoint holds the weights, and one decoder runs both.

pub mod spec;
