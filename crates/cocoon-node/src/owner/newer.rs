//! What a newer wish makes of a step that is under way. Pure.

use crate::planner::{Look, Step, observation::Wish};

/// Whether the pod asks for something else than before (not: whether our own writes changed it).
pub(super) fn asks_otherwise(before: &Wish, now: &Wish) -> bool {
    let essence = |wish: &Wish| Wish {
        id: String::new(),
        ip: String::new(),
        woken_from: String::new(),
        said_ready: false,
        live_request: None,
        ..wish.clone()
    };
    essence(before) != essence(now)
}

/// Steps whose result is the answer to something in the wish.
pub(super) const fn is_about_wish(step: &Step) -> bool {
    matches!(step, Step::EnsureImage | Step::PullSource | Step::Look(Look::Source | Look::Fork))
}

/// Steps that leave nothing behind when they are dropped half way.
pub(super) const fn may_drop(step: &Step) -> bool {
    matches!(
        step,
        Step::EnsureImage
            | Step::PullSource
            | Step::PullImport { .. }
            // The engine takes a half-made VM down when nobody waits for it any more.
            | Step::Run(_)
            | Step::Clone(_)
            | Step::PushHibernate(_)
            | Step::PushLatest(_)
            | Step::LiveSnapshot { .. }
            | Step::Prepush(_)
            | Step::Look(_)
    )
}

/// A newer wish makes the step pointless.
pub(super) fn superseded(step: &Step, wish: Option<&Wish>) -> bool {
    let ending = wish.is_none_or(|wish| wish.deleting || wish.gone);
    match step {
        Step::EnsureImage | Step::PullSource | Step::PullImport { .. } | Step::Run(_) | Step::Clone(_) => {
            ending
        }
        Step::Look(Look::Fork) => ending,
        Step::PushHibernate(_) | Step::Prepush(_) => ending || wish.is_some_and(|wish| !wish.hibernate),
        Step::LiveSnapshot { .. } => ending || wish.is_some_and(|wish| wish.hibernate),
        // Not demanded any more, or the tag is not ours to write any more.
        Step::PushLatest(request) => wish.is_some_and(|wish| {
            !wish.snapshot_on_delete || (wish.gone && request.tag == cocoon_meta::keys::DEFAULT_SNAPSHOT_TAG)
        }),
        _ => false,
    }
}
