//! Logging: one line an event, to stderr, so that stdout stays data.

use tracing_subscriber::EnvFilter;

/// Sets up logging for the process. `level` is a filter such as `info` or `cocoon_node=debug`;
/// `COCOON_LOG` in the environment wins over it. A second call does nothing.
pub fn init(level: &str) {
    // What yamux says of a broken frame is said for each, and guests send the frames; a session that ends is told of
    // by its owner.
    let usual = || EnvFilter::new(format!("{level},yamux=off"));
    let filter = EnvFilter::try_from_env("COCOON_LOG").unwrap_or_else(|_| usual());
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let format = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A log that cannot be written (a full disk) must not end the program that writes it.
    let _ = format.with_ansi(colours).log_internal_errors(false).try_init();
}
