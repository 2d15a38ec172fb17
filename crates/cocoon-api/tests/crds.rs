//! The committed CRDs are the generated ones. `UPDATE_CRDS=1 cargo test -p cocoon-api` writes them.

// A helper of tests is not seen as a test by the lint.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

fn check(file: &str, crd: &CustomResourceDefinition) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds").join(file);
    let header =
        "# Generated from crates/cocoon-api; write anew with UPDATE_CRDS=1 cargo test -p cocoon-api\n";
    let generated = format!("{header}{}", serde_yaml_ng::to_string(crd).unwrap());
    if std::env::var_os("UPDATE_CRDS").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "{} is not what the types say: run UPDATE_CRDS=1 cargo test -p cocoon-api and commit it",
        path.display()
    );
}

#[test]
fn the_committed_cocoonset_crd_is_the_generated_one() {
    check("cocoonsets.yaml", &cocoon_api::cocoon_set_crd());
}

#[test]
fn the_committed_cocoonhibernation_crd_is_the_generated_one() {
    check("cocoonhibernations.yaml", &cocoon_api::cocoon_hibernation_crd());
}
