use super::runtime;
use crate::args::FakeArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::{logging, output};
use twinfer_bench::fake;
use twinfer_config::FlagError;
use twinfer_http::Host;

pub(crate) fn run(args: FakeArgs) -> Outcome {
    logging::start(args.config.log_format);
    if let Err(error) = Host::parse(&args.config.host) {
        let why = format!("it {}", error.problem);
        let error = FlagError::new("host", format!("{:?}", args.config.host), why);
        return Err(Failure::new(Code::Config, error));
    }
    let role = args.config.role;
    runtime::single()?.block_on(async move {
        let mut signals = runtime::StopSignals::new()?;
        let address = format!("{}:{}", args.config.host, args.config.port);
        let on_ready = |addr| {
            // Without a reader it serves all the same.
            let _ = output::write(&format_args!("fake {role} instance on http://{addr}\n"));
        };
        fake::run(args.config, signals.next(), on_ready)
            .await
            .map_err(|error| Failure::new(Code::Unavailable, format!("{address}: {error}")))
    })
}
