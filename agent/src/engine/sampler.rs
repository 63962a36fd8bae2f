//! Measures what refill depends on. There is no event for "space is getting short", so it is read
//! once a second, off every path that someone waits for.

use std::{fs, sync::Arc, time::Duration};

use branchpool_agent_api::Gate;

use super::{files, world::World};
use crate::{
    blocking::blocking,
    plan::{Event, Pressure, Sample, pressure},
    storage::space,
};

const EVERY: Duration = Duration::from_secs(1);

/// Runs until the world is dropped.
pub(super) async fn run(world: Arc<World>) {
    let mut before = Pressure::default();
    let failing = world.committer.failing();
    loop {
        let sampled = {
            let world = Arc::clone(&world);
            blocking(move || {
                cut_logs(&world);
                sample(&world)
            })
            .await
        };
        match sampled.map_err(String::from).flatten() {
            Ok(sample) => {
                world.set_sample(sample);
                let mut now = pressure(&sample, &before.gates);
                if let Some(detail) = failing.borrow().clone() {
                    now.gates.push(Gate {
                        reason: "JournalFailing".to_owned(),
                        message: detail,
                    });
                }
                if now.gates.is_empty() {
                    let world = Arc::clone(&world);
                    let kept = blocking(move || files::keep_reserve(&world.layout)).await;
                    if let Ok(Err(error)) = kept {
                        tracing::warn!(%error, "no space could be set aside for the journal");
                    }
                }
                if now != before {
                    let was_shut =
                        |gate: &&Gate| before.gates.iter().any(|old| old.reason == gate.reason);
                    for gate in now.gates.iter().filter(|gate| !was_shut(gate)) {
                        tracing::warn!(
                            reason = gate.reason,
                            "refill is held back: {}",
                            gate.message
                        );
                    }
                    before = now.clone();
                    let Pressure { gates, reclaim } = now;
                    world.tell(Event::Gates { gates, reclaim }).await;
                }
            }
            Err(error) => tracing::warn!(error, "the node could not be measured"),
        }
        tokio::time::sleep(EVERY).await;
    }
}

pub(super) fn sample(world: &World) -> Result<Sample, String> {
    let space = space::read(world.layout.root()).map_err(|error| error.to_string())?;
    let memory = read("/proc/meminfo")?;
    let field = |name: &str| {
        let line = memory.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
            .map(|kib| kib << 10)
    };
    let load = read("/proc/loadavg")?;
    let processes = load
        .split_whitespace()
        .nth(3)
        .and_then(|entities| entities.split_once('/')?.1.parse().ok())
        .unwrap_or(0);
    let number = |path: &str| read(path).ok()?.trim().parse::<u64>().ok();
    let most = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"];
    let descriptors = fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64);
    let descriptors_most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    Ok(Sample {
        space,
        memory_total: field("MemTotal:").unwrap_or(0),
        memory_available: field("MemAvailable:").unwrap_or(u64::MAX),
        processes,
        processes_most: most
            .iter()
            .filter_map(|path| number(path))
            .min()
            .unwrap_or(u64::MAX),
        descriptors,
        descriptors_most: descriptors_most.unwrap_or(u64::MAX),
    })
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{path} cannot be read: {error}"))
}

/// Empties server logs beyond their cap. Their writers append, so they go on at the start.
fn cut_logs(world: &World) {
    let Ok(entries) = fs::read_dir(world.layout.logs()) else {
        return;
    };
    for entry in entries.flatten() {
        let is_long = entry
            .metadata()
            .is_ok_and(|data| data.is_file() && data.len() > world.log_cap);
        if !is_long {
            continue;
        }
        let path = entry.path();
        let cut = fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(0));
        match cut {
            Ok(()) => {
                tracing::warn!(log = %path.display(), "a server log reached its cap and was emptied");
            }
            Err(error) => {
                tracing::warn!(log = %path.display(), %error, "a server log could not be emptied");
            }
        }
    }
}
