//! The agent in the guest; see [`cocoon_guest::agent`].

fn main() -> std::process::ExitCode {
    cocoon_guest::agent::main()
}
