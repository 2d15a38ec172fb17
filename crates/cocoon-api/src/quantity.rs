//! Resource quantities in the canonical text that Kubernetes gives them.
//!
//! The storage annotation carries this text and drift is judged by comparing it, so it must come out
//! exactly as the Go components write it, with their unevenness: a decimal number whose power is a
//! multiple of three, and whose digits neither begin with 0 nor end in 000, stays as it was typed
//! (`5.`, `+1`, `1E3`, `1.500`); every other one is brought to the largest suffix that leaves an
//! integer (`1000` is `1k`, `1.5Gi` is `1536Mi`, `0.3Gi` is `322122547200m`).

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Smallest power of ten that is kept; what is smaller is rounded away from zero.
const NANO: i32 = -9;
/// Digits a number may have to stay as typed: one fewer than `i64` needs.
const EXACT_DIGITS: usize = 18;
/// Largest power that is taken at all; far above anything that can be stored.
const MAX_EXPONENT: i32 = 1_000;
/// Digits held in an `i128` without overflow.
const MAX_DIGITS: usize = 30;

/// Which family of suffixes a quantity was written with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `m`, none, `k`, `M`, …
    DecimalSI,
    /// `Ki`, `Mi`, …
    BinarySI,
    /// `e3`, `E3`.
    DecimalExponent,
}

/// Why a text is no quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// It does not have the form of a number and a suffix.
    #[error("{text:?} is no quantity: write a number and a suffix, such as 512Mi, 20Gi or 1500m")]
    Format {
        /// The text.
        text: String,
    },
    /// The number is followed by an unknown suffix.
    #[error(
        "quantity {text:?} has an unknown suffix: use one of Ki Mi Gi Ti Pi Ei, n u m k M G T P E, or an exponent such as e3"
    )]
    Suffix {
        /// The text.
        text: String,
    },
    /// More digits or a larger power than a quantity can hold.
    #[error("quantity {text:?} is out of range: use at most 30 digits")]
    Range {
        /// The text.
        text: String,
    },
}

/// A resource quantity: an exact number and its canonical text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Quantity {
    /// The number is `digits * 10^scale`.
    digits: i128,
    scale: i32,
    format: Format,
    text: Box<str>,
}

impl Quantity {
    /// Whether it is nothing.
    pub fn is_zero(&self) -> bool {
        self.digits == 0
    }

    /// Family of suffixes it was written with.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The canonical text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The number in whole units, rounded away from zero; `None` when an `i64` cannot hold it.
    pub fn value(&self) -> Option<i64> {
        self.scaled(0)
    }

    /// The number in thousandths, rounded away from zero; `None` when an `i64` cannot hold it.
    pub fn milli_value(&self) -> Option<i64> {
        self.scaled(-3)
    }

    fn scaled(&self, scale: i32) -> Option<i64> {
        if self.digits == 0 {
            return Some(0);
        }
        let power = self.scale - scale;
        let value = if power >= 0 {
            10i128.checked_pow(power.unsigned_abs())?.checked_mul(self.digits)?
        } else {
            divide_away_from_zero(self.digits, power.unsigned_abs())
        };
        i64::try_from(value).ok()
    }
}

/// `digits / 10^power`, rounded away from zero.
fn divide_away_from_zero(digits: i128, power: u32) -> i128 {
    let Some(divisor) = 10i128.checked_pow(power) else { return digits.signum() };
    let rest = if digits % divisor == 0 { 0 } else { digits.signum() };
    digits / divisor + rest
}

/// A text cut into its parts: sign, digits before the point, digits after it, suffix.
struct Parts<'a> {
    negative: bool,
    whole: &'a str,
    fraction: &'a str,
    suffix: Suffix,
}

#[derive(Clone, Copy)]
enum Suffix {
    /// Power of ten.
    Decimal(i32),
    /// Power of two.
    Binary(u32),
    /// Power of ten after `e` or `E`.
    Exponent(i32),
}

impl Suffix {
    fn parse(text: &str) -> Option<Self> {
        if let Some(at) = BINARY.iter().position(|known| *known == text) {
            return Some(Self::Binary((u32::try_from(at).ok()? + 1) * 10));
        }
        if let Some((_, power)) = DECIMAL.iter().find(|(known, _)| *known == text) {
            return Some(Self::Decimal(*power));
        }
        let power: i32 = text.strip_prefix(['e', 'E'])?.parse().ok()?;
        (power.abs() <= MAX_EXPONENT).then_some(Self::Exponent(power))
    }
}

const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];

impl<'a> Parts<'a> {
    fn cut(text: &'a str) -> Result<Self, QuantityError> {
        let wrong_form = || QuantityError::Format { text: text.to_owned() };
        if text.is_empty() {
            return Err(wrong_form());
        }
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let (whole, rest) = split_digits(unsigned);
        let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), split_digits);
        let allowed = |c: char| c.is_ascii_digit() || "eEinumkKMGTP.+-".contains(c);
        if !suffix.chars().all(allowed) {
            return Err(wrong_form());
        }
        let suffix = Suffix::parse(suffix).ok_or_else(|| QuantityError::Suffix { text: text.to_owned() })?;
        Ok(Self { negative: text.starts_with('-'), whole: whole.trim_start_matches('0'), fraction, suffix })
    }

    /// All digits without the point; a number without any is 0.
    fn digits(&self) -> String {
        match (self.whole, self.fraction) {
            ("", "") => "0".to_owned(),
            ("", fraction) => format!("0{fraction}"),
            (whole, fraction) => format!("{whole}{fraction}"),
        }
    }

    fn format(&self) -> Format {
        match self.suffix {
            Suffix::Decimal(_) => Format::DecimalSI,
            Suffix::Binary(_) => Format::BinarySI,
            Suffix::Exponent(_) => Format::DecimalExponent,
        }
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let parts = Parts::cut(text)?;
        let format = parts.format();
        let out_of_range = || QuantityError::Range { text: text.to_owned() };
        let all = parts.digits();
        if all.len() > MAX_DIGITS {
            return Err(out_of_range());
        }
        let mut digits: i128 = all.parse().map_err(|_| out_of_range())?;
        if parts.negative {
            digits = -digits;
        }
        let fraction = i32::try_from(parts.fraction.len()).map_err(|_| out_of_range())?;
        let scale = match parts.suffix {
            Suffix::Decimal(power) | Suffix::Exponent(power) => power - fraction,
            Suffix::Binary(power) => {
                digits = digits.checked_mul(1 << power).ok_or_else(out_of_range)?;
                digits = cap_binary(digits, fraction);
                if digits.abs() == i128::from(i64::MAX) { 0 } else { -fraction }
            }
        };
        let (digits, scale) = at_least_nano(digits, scale);
        let as_typed = format != Format::BinarySI
            && all.len() <= EXACT_DIGITS
            && scale % 3 == 0
            && scale >= NANO
            && !all.ends_with("000")
            && !all.starts_with('0');
        let canonical = if as_typed { text.to_owned() } else { canonical(digits, scale, format) };
        Ok(Self { digits, scale, format, text: canonical.into() })
    }
}

/// Binary quantities end at `i64::MAX` units.
fn cap_binary(digits: i128, fraction: i32) -> i128 {
    let limit = i128::from(i64::MAX);
    let whole = divide_away_from_zero(digits, fraction.unsigned_abs());
    if whole.abs() > limit { limit * digits.signum() } else { digits }
}

/// Rounds what is finer than a nano away from zero.
fn at_least_nano(digits: i128, scale: i32) -> (i128, i32) {
    if scale >= NANO {
        return (digits, scale);
    }
    (divide_away_from_zero(digits, (NANO - scale).unsigned_abs()), NANO)
}

/// The text with the largest suffix of the family that leaves an integer.
fn canonical(digits: i128, scale: i32, format: Format) -> String {
    if digits == 0 {
        return "0".to_owned();
    }
    if format == Format::BinarySI
        && let Some(text) = canonical_binary(digits, scale)
    {
        return text;
    }
    let (mut digits, mut scale) = (digits, scale);
    while digits % 10 == 0 {
        digits /= 10;
        scale += 1;
    }
    while scale % 3 != 0 {
        digits *= 10;
        scale -= 1;
    }
    let known = DECIMAL.iter().find(|(_, power)| *power == scale);
    match (format, known) {
        (Format::DecimalExponent, _) | (_, None) if scale == 0 => digits.to_string(),
        (Format::DecimalExponent, _) | (_, None) => format!("{digits}e{scale}"),
        (_, Some((suffix, _))) => format!("{digits}{suffix}"),
    }
}

/// `None` when the number is no integer, or below 1024 and so better said in decimals.
fn canonical_binary(digits: i128, scale: i32) -> Option<String> {
    let divisor = 10i128.checked_pow(scale.unsigned_abs())?;
    if scale > 0 || digits % divisor != 0 {
        return None;
    }
    let mut units = digits / divisor;
    if units.abs() < 1024 {
        return None;
    }
    let mut suffix = "";
    for next in BINARY {
        if units % 1024 != 0 {
            break;
        }
        units /= 1024;
        suffix = next;
    }
    Some(format!("{units}{suffix}"))
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    /// Takes a text (space around it is ignored) or a number, as the API server does.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(text) => text,
            serde_json::Value::Number(number) => number.to_string(),
            other => {
                return Err(serde::de::Error::custom(format!(
                    "{other} is no quantity: write a text such as \"20Gi\""
                )));
            }
        };
        text.trim().parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Quantity {
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": kinds(),
            "pattern": PATTERN,
            "x-kubernetes-int-or-string": true,
        })
    }
}

/// What a quantity may be on the wire, for the schema.
pub(crate) fn kinds() -> serde_json::Value {
    serde_json::json!([{ "type": "integer" }, { "type": "string" }])
}

/// The form of a quantity, for the schema.
pub(crate) const PATTERN: &str =
    r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(of: &str) -> String {
        of.parse::<Quantity>().unwrap().to_string()
    }

    #[test]
    fn a_quantity_is_written_with_the_largest_suffix_that_leaves_an_integer() {
        let table = [
            ("1000", "1k"),
            ("1.5Gi", "1536Mi"),
            ("0.3Gi", "322122547200m"),
            ("2048Gi", "2Ti"),
            ("1.5e3", "1500"),
            ("1e19", "10e18"),
            ("0Gi", "0"),
            ("8Ei", "9223372036854775807"),
        ];
        for (given, canonical) in table {
            assert_eq!(text(given), canonical, "{given}");
        }
    }

    #[test]
    fn a_number_of_a_thousandfold_power_stays_as_typed() {
        for given in ["5.", "+1", "01", "1E3", "1.500", "1e9"] {
            assert_eq!(text(given), given);
        }
    }

    #[test]
    fn what_an_i64_cannot_hold_has_no_value() {
        let huge: Quantity = "1e100".parse().unwrap();
        assert_eq!((huge.value(), huge.milli_value()), (None, None));
        let exa: Quantity = "1Ei".parse().unwrap();
        assert_eq!((exa.value(), exa.milli_value()), (Some(1 << 60), None));
    }

    #[test]
    fn a_fraction_of_a_unit_counts_as_one() {
        let nano: Quantity = "1n".parse().unwrap();
        assert_eq!((nano.value(), nano.milli_value()), (Some(1), Some(1)));
        let less: Quantity = "-1m".parse().unwrap();
        assert_eq!(less.value(), Some(-1));
    }

    proptest! {
        #[test]
        fn parsing_never_panics(given in "[-+]?[0-9]{0,40}\\.?[0-9]{0,12}([eE]?[-+]?[0-9]{0,5}|[numkKMGTPEi]{0,3})") {
            let _ = given.parse::<Quantity>();
        }

        #[test]
        fn canonical_text_is_a_fixed_point_and_keeps_the_number(
            whole in 0u64..100_000_000,
            fraction in "(\\.[0-9]{1,3})?",
            suffix in prop::sample::select(vec!["", "m", "k", "M", "G", "Ki", "Mi", "Gi", "Ti", "e3", "e-3", "e2"]),
        ) {
            let first: Quantity = format!("{whole}{fraction}{suffix}").parse().unwrap();
            let second: Quantity = first.as_str().parse().unwrap();
            prop_assert_eq!(first.as_str(), second.as_str());
            prop_assert_eq!(first.value(), second.value());
            prop_assert_eq!(first.milli_value(), second.milli_value());
        }

        #[test]
        fn reading_any_json_never_panics(given in any::<i64>()) {
            let read: Quantity = serde_json::from_value(serde_json::json!(given)).unwrap();
            prop_assert_eq!(read.value(), Some(given));
        }
    }
}
