//! One binary; what it does is in the library of the same name.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Set by `cargo xtask`; without it cargo would have to build anew after each commit.
    let build =
        cocoon::cli::Build { git: option_env!("COCOON_GIT_HASH"), built: option_env!("COCOON_BUILT") };
    cocoon::cli::main(std::env::args_os(), build)
}
