//! The binary as a user runs it, against stand-ins for what is remote.

mod bench;
mod cli;
mod faults;
mod hub;
mod s3;
mod support;
