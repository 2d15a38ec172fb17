//! The README's story with real guests: the same code that `cargo xtask demo` runs.

use xtask::story;

use crate::common;

#[test]
fn the_story_holds_from_the_first_boot_to_the_last_delete() {
    let mut lab = common::lab();
    let rows = story::run(&mut lab, true).unwrap_or_else(|error| panic!("{error:#}"));
    let claims = rows.iter().filter(|row| row.took.is_none()).count();
    assert!(claims > 50, "the story made only {claims} claims");
}
