//! One binary: command line, configuration, wiring.
//!
//! - [`cli`]: the command line; [`cli::main`] is the whole program;
//! - [`up`]: `cocoon up`;
//! - [`net_cmd`]: `cocoon net`;
//! - [`registry`]: where saved VMs are kept, for all of them.

pub mod cli;
pub mod net_cmd;
pub mod registry;
pub mod up;
mod version;
