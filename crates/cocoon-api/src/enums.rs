//! The closed vocabularies of the CRDs, kept open on the wire.
//!
//! Each type knows its values, says whether a text is one of them ([`AgentMode::is_valid`]) and what an
//! unset value stands for ([`AgentMode::or_default`]). A text outside the vocabulary is kept as it
//! came: the schema and admission refuse it, and an object that was stored before a rule existed must
//! still be readable, so that its owner can be told what is wrong with it. The empty text is never
//! valid; defaulting is a separate step.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Defines one vocabulary. With `default Variant` it also gets `or_default`.
macro_rules! vocabulary {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }
        $(default $default:ident)?
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$vdoc])* $variant,)+
            /// A text outside the vocabulary (the empty one too), kept as it came.
            Other(Box<str>),
        }

        impl $name {
            /// The valid texts, in the order of the contract.
            pub const VALUES: &'static [&'static str] = &[$($text),+];

            /// The text on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $text,)+
                    Self::Other(text) => text,
                }
            }

            /// Whether the text is one of the vocabulary; the empty text is not.
            pub fn is_valid(&self) -> bool {
                !matches!(self, Self::Other(_))
            }

            $(
            /// The value itself, or the contract's default when it is empty. Unknown texts stay.
            #[must_use]
            pub fn or_default(self) -> Self {
                match self {
                    Self::Other(text) if text.is_empty() => Self::$default,
                    set => set,
                }
            }

            /// The value of an optional field with its default filled in.
            pub fn resolve(field: Option<&Self>) -> Self {
                field.cloned().map_or(Self::$default, Self::or_default)
            }
            )?
        }

        $(
        impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        }
        )?

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                match text {
                    $($text => Self::$variant,)+
                    other => Self::Other(other.into()),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Ok(Self::from(Cow::<'de, str>::deserialize(deserializer)?.as_ref()))
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "enum": Self::VALUES })
            }
        }
    };
}

vocabulary! {
    /// How an agent VM comes to be.
    AgentMode {
        /// Cloned from a snapshot; the guest's resources are the snapshot's.
        Clone = "clone",
        /// Booted from an image with the pod's resources.
        Run = "run",
    } default Clone
}

vocabulary! {
    /// How a toolbox VM comes to be.
    ToolboxMode {
        /// Booted from an image.
        Run = "run",
        /// Cloned from a snapshot.
        Clone = "clone",
        /// Exists already, outside our care: only its id and address are known.
        Static = "static",
    } default Run
}

vocabulary! {
    /// Operating system family of the guest.
    OSType {
        /// Linux.
        Linux = "linux",
        /// Windows.
        Windows = "windows",
        /// Android.
        Android = "android",
        /// macOS.
        MacOS = "macos",
    } default Linux
}

vocabulary! {
    /// The hypervisor the contract names. A node may map it to the one it has.
    Backend {
        /// Cloud Hypervisor.
        CloudHypervisor = "cloud-hypervisor",
        /// Firecracker.
        Firecracker = "firecracker",
    } default CloudHypervisor
}

vocabulary! {
    /// Protocol by which a person connects to the VM. It has no default: an unset one is inferred
    /// from the VNC port and the guest's system.
    ConnType {
        /// Secure shell.
        Ssh = "ssh",
        /// Remote desktop.
        Rdp = "rdp",
        /// VNC.
        Vnc = "vnc",
        /// Android debug bridge.
        Adb = "adb",
    }
}

vocabulary! {
    /// Which VMs of a set are saved as `:latest` when their pod is deleted.
    SnapshotPolicy {
        /// All of them.
        Always = "always",
        /// The main agent alone.
        MainOnly = "main-only",
        /// None.
        Never = "never",
    } default Always
}

vocabulary! {
    /// What happens to a pod's seat on its node while its set is suspended.
    HibernatePolicy {
        /// The pod stays as a placeholder.
        Retain = "retain",
        /// The pod is deleted; its state waits in the registry.
        Release = "release",
    } default Retain
}

vocabulary! {
    /// What a CocoonHibernation asks for.
    HibernationDesire {
        /// Save the VM and stop it.
        Hibernate = "Hibernate",
        /// Bring it back.
        Wake = "Wake",
    }
}

vocabulary! {
    /// Where a CocoonSet stands.
    CocoonSetPhase {
        /// The main agent is missing or not ready.
        Pending = "Pending",
        /// All is as the spec says.
        Running = "Running",
        /// Sub-agents or toolboxes are missing or not ready.
        Scaling = "Scaling",
        /// Pods are being hibernated.
        Suspending = "Suspending",
        /// Every managed pod is hibernated.
        Suspended = "Suspended",
        /// A released main agent is being restored.
        Waking = "Waking",
        /// The main agent moves to another node.
        Migrating = "Migrating",
        /// The main agent failed.
        Failed = "Failed",
    }
}

vocabulary! {
    /// Where a CocoonHibernation stands.
    CocoonHibernationPhase {
        /// Its pod is not there yet.
        Pending = "Pending",
        /// Being saved.
        Hibernating = "Hibernating",
        /// Saved, and no VM runs.
        Hibernated = "Hibernated",
        /// Being restored.
        Waking = "Waking",
        /// The VM runs again.
        Active = "Active",
        /// It did not work; the Ready condition says why.
        Failed = "Failed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_text_is_never_valid_and_resolves_to_the_default() {
        let empty = AgentMode::from("");
        assert!(!empty.is_valid());
        assert_eq!(empty.or_default(), AgentMode::Clone);
        assert_eq!(ToolboxMode::resolve(None), ToolboxMode::Run);
        assert_eq!(SnapshotPolicy::resolve(Some(&SnapshotPolicy::Never)), SnapshotPolicy::Never);
    }

    #[test]
    fn an_unknown_text_survives_a_round_trip_and_is_not_defaulted() {
        let json = "\"Beos\"";
        let os: OSType = serde_json::from_str(json).unwrap();
        assert!(!os.is_valid());
        assert_eq!(os.clone().or_default(), os);
        assert_eq!(serde_json::to_string(&os).unwrap(), json);
    }

    #[test]
    fn every_listed_text_parses_to_a_valid_value_with_that_text() {
        for text in CocoonSetPhase::VALUES {
            let phase = CocoonSetPhase::from(*text);
            assert!(phase.is_valid());
            assert_eq!(phase.as_str(), *text);
        }
    }
}
