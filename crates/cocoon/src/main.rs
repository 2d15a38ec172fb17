//! One binary; what it does is in the library of the same name.

use std::process::ExitCode;

fn main() -> ExitCode {
    cocoon::cli::main(std::env::args_os())
}
