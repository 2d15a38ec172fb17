//! What a path names.
//!
//! Entry point: [`Target::parse`]. Invariant: a path is decoded once, segment by segment; an encoded slash
//! never becomes a separator.

use percent_encoding::percent_decode_str;

/// A thing of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// Anything that is not below a group version: `/version`, `/apis`, `/openapi/v3/...`.
    Other(Vec<String>),
    /// `/api/v1` or `/apis/GROUP/VERSION` itself.
    GroupVersion {
        group: String,
        version: String,
    },
    Resource(Address),
}

/// A collection, an object or a subresource.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Address {
    pub(crate) group: String,
    pub(crate) version: String,
    /// Empty: all namespaces, or a resource of the cluster.
    pub(crate) namespace: String,
    pub(crate) resource: String,
    /// Empty: the collection.
    pub(crate) name: String,
    pub(crate) subresource: String,
}

impl Target {
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let path = path.strip_prefix('/')?;
        let path = path.strip_suffix('/').unwrap_or(path);
        let decode = |segment: &str| Some(percent_decode_str(segment).decode_utf8().ok()?.into_owned());
        let segments: Vec<String> = path.split('/').map(decode).collect::<Option<_>>()?;
        let words: Vec<&str> = segments.iter().map(String::as_str).collect();
        let (group, version, rest) = match words.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return Some(Self::Other(segments)),
        };
        if rest.is_empty() {
            return Some(Self::GroupVersion { group: group.into(), version: version.into() });
        }
        let (namespace, rest) = split_namespace(rest);
        let (resource, name, subresource) = match rest {
            [resource] => (*resource, "", ""),
            [resource, name] if !name.is_empty() => (*resource, *name, ""),
            [resource, name, subresource] if !name.is_empty() => (*resource, *name, *subresource),
            _ => return None,
        };
        Some(Self::Resource(Address {
            group: group.into(),
            version: version.into(),
            namespace: namespace.into(),
            resource: resource.into(),
            name: name.into(),
            subresource: subresource.into(),
        }))
    }
}

/// `namespaces/NS/rest` is inside a namespace, unless it is the namespace or a subresource of it.
fn split_namespace<'a>(words: &'a [&'a str]) -> (&'a str, &'a [&'a str]) {
    match words {
        ["namespaces", _] | ["namespaces", _, "status" | "finalize"] => ("", words),
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (namespace, rest),
        _ => ("", words),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(path: &str) -> Option<[String; 5]> {
        match Target::parse(path)? {
            Target::Resource(a) => Some([a.group, a.namespace, a.resource, a.name, a.subresource]),
            _ => None,
        }
    }

    #[test]
    fn paths_name_collections_objects_and_subresources() {
        for (path, wanted) in [
            ("/api/v1/pods", ["", "", "pods", "", ""]),
            ("/api/v1/namespaces", ["", "", "namespaces", "", ""]),
            ("/api/v1/namespaces/a", ["", "", "namespaces", "a", ""]),
            ("/api/v1/namespaces/a/status", ["", "", "namespaces", "a", "status"]),
            ("/api/v1/namespaces/a/pods/", ["", "a", "pods", "", ""]),
            ("/api/v1/namespaces/a/pods/b/log", ["", "a", "pods", "b", "log"]),
            ("/apis/g.io/v1/nodes/a%2Fb", ["g.io", "", "nodes", "a/b", ""]),
        ] {
            assert_eq!(address(path).unwrap(), wanted.map(String::from), "{path}");
        }
        assert!(Target::parse("/api/v1/namespaces/a/pods/b/c/d").is_none());
        assert!(Target::parse("/api/v1/pods//log").is_none());
    }

    proptest! {
        #[test]
        fn any_path_is_named_or_refused(path in ".{0,60}") {
            let _ = Target::parse(&path);
        }
    }
}
