//! The committed golden vectors, as part of `cargo test`.

use cocoon_checks::vectors::{check_folder, committed_folder};

#[test]
fn everything_that_is_built_answers_the_golden_vectors() {
    let report = check_folder(&committed_folder(), true).unwrap();
    assert_eq!(report.failed(), 0, "\n{report}");
    assert!(report.passed() > 600, "\n{report}");
}
