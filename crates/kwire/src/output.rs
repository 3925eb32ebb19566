//! What commands print to standard output.
//!
//! A reader that has seen enough, as in `kwire list | head`, closes the pipe: that ends the program quietly, as it ends
//! every other tool, and is no panic.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Prints `text` as it is, at once.
pub fn print(text: impl Display) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        done => done,
    }
}

/// Prints a line.
pub fn line(text: impl Display) -> std::io::Result<()> {
    print(format_args!("{text}\n"))
}
