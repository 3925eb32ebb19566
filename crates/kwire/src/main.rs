//! The `kwire` command.
fn main() {}
