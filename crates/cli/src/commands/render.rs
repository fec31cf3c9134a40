//! `twinfer render`.

use crate::args::RenderArgs;
use crate::commands::plan;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use twinfer_deploy::engines::{RenderOptions, render, write_files};

pub(crate) fn run(args: &RenderArgs) -> Outcome {
    if plan::engine(&args.file)?.is_none() {
        let message =
            "render writes files for engines by template; `twinfer up` starts the native engine";
        return Err(Failure::new(Code::Config, message));
    }
    let (deployment, resolved) = plan::load_engines(&args.file, &args.engines)?;
    let folder = args
        .folder
        .clone()
        .unwrap_or_else(|| format!("/opt/twinfer/{}", resolved.deployment));
    let files = render(&deployment, &resolved, &RenderOptions { folder });
    write_files(&files, &args.out, args.force).map_err(|error| {
        Failure::new(
            Code::Config,
            format!("--out {}: {error}", args.out.display()),
        )
    })?;
    let list: String = files
        .iter()
        .map(|file| format!("{}\n", file.path))
        .collect();
    output::write(&list)
}
