//! An OpenAI-compatible server in front of one engine.

pub mod text;
