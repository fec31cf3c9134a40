use crate::{run, stdout, twinfer};
use std::path::Path;

/// The reference in docs/ is what the binary prints.
#[test]
fn the_reference_pages_are_those_of_this_build() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    for (page, file) in [
        ("flags", "flags.md"),
        ("schema", "deploy.schema.json"),
        ("example", "deploy.example.yaml"),
    ] {
        let output = run(twinfer().args(["reference", page]));
        assert_eq!(output.status.code(), Some(0));
        let path = folder.join(file);
        let shown = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(
            shown == stdout(&output),
            "docs/reference/{file} is stale: cargo run --release -- reference {page} > docs/reference/{file}"
        );
    }
}
