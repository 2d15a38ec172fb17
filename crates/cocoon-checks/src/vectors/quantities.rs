//! Resource quantities (cocoon-api).

use anyhow::Result;
use cocoon_api::{Format, Quantity, QuantityError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::checkers::{refused, unknown_function};
use super::folder::Vector;

/// The object the originals read a quantity from and write it back into.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Holder {
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<Quantity>,
}

pub(crate) fn answer(vector: &Vector) -> Result<Value> {
    match vector.function.as_str() {
        "quantity" => Ok(quantity(vector.text("text"))),
        "quantity_json" => Ok(from_json(vector.text("json"))),
        _ => unknown_function(vector),
    }
}

fn quantity(text: &str) -> Value {
    let mut answer = match text.parse::<Quantity>() {
        Ok(quantity) => json!({
            "ok": true,
            "format": format_name(quantity.format()),
            "is_zero": quantity.is_zero(),
            "string": quantity.as_str(),
            "value": counted(quantity.value(), &quantity, 0),
            "milli": counted(quantity.milli_value(), &quantity, 3),
        }),
        Err(error) => json!({ "ok": false, "error": true, "err_kind": kind(&error) }),
    };
    match serde_json::from_value::<Holder>(json!({ "s": text })) {
        Ok(holder) => {
            answer["json_back"] = back(&holder).into();
            answer["json_string"] = holder.s.map(|quantity| quantity.to_string()).into();
        }
        Err(_) => answer["json_error"] = true.into(),
    }
    answer
}

/// A count, or [`OUT_OF_RANGE`] when there is none, which must then be true: the canonical text, read by
/// other code, is past the range too.
fn counted(count: Option<i64>, quantity: &Quantity, power: i32) -> Value {
    match count {
        Some(count) => count.into(),
        None if approximately(quantity.as_str()) * 10f64.powi(power) >= 9.2e18 => OUT_OF_RANGE.into(),
        None => "no count, though it would fit".into(),
    }
}

/// What a quantity without a value or a milli value is shown as.
const OUT_OF_RANGE: &str = "out of i64";

/// Size of a canonical quantity, good to some digits.
fn approximately(text: &str) -> f64 {
    let end = text.find(|c: char| !(c.is_ascii_digit() || ".+-".contains(c))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let unit = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        _ if suffix.starts_with('e') || (suffix.starts_with('E') && suffix.len() > 1 && suffix != "Ei") => {
            format!("1{suffix}").parse().unwrap_or(f64::NAN)
        }
        _ => {
            let power = "kMGTPE".find(suffix.chars().next().unwrap_or('k')).map_or(1, |at| at + 1);
            let base: f64 = if suffix.ends_with('i') { 1024.0 } else { 1000.0 };
            (0..power).map(|_| base).product()
        }
    };
    (number.parse::<f64>().unwrap_or(f64::NAN) * unit).abs()
}

fn from_json(text: &str) -> Value {
    let Ok(holder) = serde_json::from_str::<Holder>(text) else { return refused() };
    let canonical = holder.s.as_ref().map(ToString::to_string).unwrap_or_default();
    json!({ "ok": true, "error": null, "json_back": back(&holder), "json_string": canonical })
}

fn back(holder: &Holder) -> String {
    serde_json::to_string(holder).unwrap_or_default()
}

fn format_name(format: Format) -> &'static str {
    match format {
        Format::DecimalSI => "DecimalSI",
        Format::BinarySI => "BinarySI",
        Format::DecimalExponent => "DecimalExponent",
    }
}

fn kind(error: &QuantityError) -> &'static str {
    match error {
        QuantityError::Format { .. } => "format",
        QuantityError::Suffix { .. } => "suffix",
        QuantityError::Range { .. } => "range",
    }
}
