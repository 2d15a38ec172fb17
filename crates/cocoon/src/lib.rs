//! One binary: command line, configuration, wiring.
//!
//! - [`cli`]: the command line; [`cli::main`] is the whole program;
//! - [`up`]: `cocoon up`;
//! - [`net_cmd`]: `cocoon net`.

pub mod cli;
pub mod net_cmd;
pub mod up;
