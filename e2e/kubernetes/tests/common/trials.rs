//! One cluster for all tests of a program, one test after the other.

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use branchpool_e2e_kubernetes::{Cluster, Options};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, sync::Mutex};

/// What the tests share.
pub(crate) trait Stage: Sized + Send + 'static {
    /// Images that the nodes are to have.
    const IMAGES: &'static [&'static str];

    async fn begin(cluster: Cluster) -> Result<Self, Failed>;

    fn cluster(&mut self) -> &mut Cluster;

    /// What a test did not take away because it failed goes, so that the next one can pass.
    async fn clear(&mut self);

    /// For the last tests, which look at what the others did.
    fn count(&mut self, _passed: bool) {}
}

pub(crate) type Test<S> = fn(&Runtime, &mut S) -> Result<(), Failed>;

#[macro_export]
macro_rules! trials {
    ($($module:ident :: $name:ident),* $(,)?) => {
        &[$((stringify!($name), |runtime, stage| runtime.block_on($module::$name(stage)))),*]
    };
}

struct Context<S> {
    runtime: Runtime,
    stage: Mutex<S>,
    times: Mutex<Vec<(&'static str, Duration)>>,
}

impl<S: Stage> Context<S> {
    fn start() -> Result<Self, Failed> {
        let start = Instant::now();
        let runtime = Runtime::new()?;
        let options = Options {
            images: S::IMAGES.iter().copied().map(str::to_owned).collect(),
            ..Options::default()
        };
        let stage = runtime.block_on(async { S::begin(Cluster::start(options).await?).await })?;
        Ok(Self {
            runtime,
            stage: Mutex::new(stage),
            times: Mutex::new(vec![("the cluster's start", start.elapsed())]),
        })
    }

    fn run(&self, name: &'static str, test: Test<S>) -> Result<(), Failed> {
        let mut stage = self.stage.blocking_lock();
        let start = Instant::now();
        // A panic would keep what it left from being cleared.
        let tried = std::panic::AssertUnwindSafe(|| test(&self.runtime, &mut stage));
        let result = std::panic::catch_unwind(tried)
            .unwrap_or_else(|_| Err("it panicked, for the reason above".into()));
        self.times.blocking_lock().push((name, start.elapsed()));
        if result.is_err() {
            self.runtime.block_on(stage.clear());
        }
        stage.count(result.is_ok());
        result
    }
}

pub(crate) fn run<S: Stage>(tests: &'static [(&'static str, Test<S>)]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let context = (!arguments.list)
        .then(|| Arc::new(Context::<S>::start().expect("the cluster should start")));
    let trials = tests
        .iter()
        .map(|(name, test)| {
            let context = context.clone();
            Trial::test(*name, move || {
                let context = context.expect("a test should have a cluster");
                context.run(name, *test)
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(context) = context {
        for (name, time) in &*context.times.blocking_lock() {
            println!("{:6.1} s  {name}", time.as_secs_f64());
        }
        if conclusion.has_failed()
            && let Some(own) = context.stage.blocking_lock().cluster().own_mut()
        {
            own.keep_logs();
        }
    }
    conclusion.exit_code()
}
