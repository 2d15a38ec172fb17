//! The committed golden vectors, as part of `cargo test`.

use std::process::Command;

#[test]
fn everything_that_is_built_answers_the_golden_vectors() {
    let run = Command::new(env!("CARGO_BIN_EXE_vectors")).arg("--built-only").output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}\n{}", String::from_utf8_lossy(&run.stderr));
    assert!(text.trim_end().ends_with(" passed, 0 failed"), "{text}");
}
