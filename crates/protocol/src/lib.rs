//! Wire types: what goes over HTTP between clients, gateways and servers, as plain data.
//!
//! Nothing here knows a runtime, a socket or the engine. Requests are read from raw JSON ([`openai::Fields`]) so that
//! every error names its parameter by path; responses are structs that borrow what they print.

pub mod load;
pub mod openai;
pub mod prefix;
pub mod resume;
