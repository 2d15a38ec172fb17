//! The phases that the engine logs for each clone, caught as numbers.
//!
//! Entry point: [`listen`]. The engine's event "cloned" carries `*_ms` fields; everything louder than
//! a note goes to stderr.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    filter::LevelFilter,
    layer::{Context, SubscriberExt as _},
    util::SubscriberInitExt as _,
};

/// Milliseconds since the engine's clone began, by phase.
pub(super) type Marks = BTreeMap<&'static str, f64>;

/// What the engine logged.
#[derive(Debug, Clone, Default)]
pub(super) struct Phases(Arc<Mutex<Option<Marks>>>);

impl Phases {
    /// The last clone's phases, once.
    pub(super) fn take(&self) -> Option<Marks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<S: Subscriber> Layer<S> for Phases {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() != Level::INFO || !event.metadata().target().starts_with("cocoon_engine")
        {
            return;
        }
        let mut marks = Numbers::default();
        event.record(&mut marks);
        if marks.0.contains_key("answered_ms") {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(marks.0);
        }
    }
}

#[derive(Default)]
struct Numbers(Marks);

impl Visit for Numbers {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of one clone")]
    fn record_u128(&mut self, field: &Field, value: u128) {
        self.0.insert(field.name(), value as f64);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

/// Sets up logging for this process; call it once.
pub(super) fn listen() -> Phases {
    let phases = Phases::default();
    let loud = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(LevelFilter::WARN);
    let _ = tracing_subscriber::registry().with(phases.clone()).with(loud).try_init();
    phases
}
