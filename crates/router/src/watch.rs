//! The instances file while the router runs: what it says is done, and while it says nothing that makes sense, what it
//! said last.

use crate::RouterError;
use crate::instances::InstanceSpec;
use crate::registry::Registry;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use twinfer_http::Gauge;

/// Between two looks at the file.
const LOOK: Duration = Duration::from_millis(500);

/// Follows the file until dropped. `good` is 1 while the file can be read and makes sense.
pub(crate) async fn follow(
    path: PathBuf,
    mut last: Vec<InstanceSpec>,
    registry: Arc<Registry>,
    drain: Duration,
    good: Gauge,
) {
    let mut told = None;
    good.set(1);
    loop {
        tokio::time::sleep(LOOK).await;
        let path = path.clone();
        // Such a file is small, but its disk may be slow.
        let read = tokio::task::spawn_blocking(move || InstanceSpec::read_file(&path)).await;
        let Ok(read) = read else { return };
        match judge(read, &last) {
            Change::Same => {}
            Change::New(specs) => {
                tracing::info!(instances = specs.len(), "the instances file has changed");
                registry.follow_file(&specs, drain);
                last = specs;
            }
            Change::Bad(problem) => {
                good.set(0);
                if told.as_ref() != Some(&problem) {
                    tracing::warn!(
                        problem,
                        "the instances file makes no sense; what it said before holds"
                    );
                    told = Some(problem);
                }
                continue;
            }
        }
        good.set(1);
        told = None;
    }
}

/// What a look at the file means.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    Same,
    New(Vec<InstanceSpec>),
    Bad(String),
}

fn judge(read: Result<Vec<InstanceSpec>, RouterError>, last: &[InstanceSpec]) -> Change {
    match read {
        Err(error) => Change::Bad(error.to_string()),
        // A file that is being written begins empty.
        Ok(specs) if specs.is_empty() => Change::Bad("it names no instance".to_owned()),
        Ok(specs) if specs == last => Change::Same,
        Ok(specs) => Change::New(specs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn a_file_that_is_gone_empty_or_garbled_changes_nothing() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        writeln!(file, "prefill http://a:1\ndecode http://b:2").expect("written");
        let read = || InstanceSpec::read_file(file.path());
        let first = read().expect("instances");
        assert_eq!(judge(read(), &first), Change::Same);
        for bad in [
            "",
            "# nothing\n",
            "prefill http://a:1\ndecode http://b",
            "\u{0}\u{1}",
        ] {
            std::fs::write(file.path(), bad).expect("written");
            assert!(matches!(judge(read(), &first), Change::Bad(_)), "{bad:?}");
        }
        std::fs::write(file.path(), "prefill http://a:1\ndecode http://c:3").expect("written");
        assert!(matches!(judge(read(), &first), Change::New(specs) if specs.len() == 2));
        let path = file.path().to_owned();
        drop(file);
        assert!(matches!(
            judge(InstanceSpec::read_file(&path), &first),
            Change::Bad(_)
        ));
    }
}
