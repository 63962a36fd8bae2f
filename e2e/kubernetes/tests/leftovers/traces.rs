//! What one cluster has on this machine, told from what others have.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

#[derive(Debug)]
pub(crate) struct Traces {
    directory: PathBuf,
    interface: PathBuf,
    /// Names are used again.
    interface_index: String,
    cgroups: Vec<PathBuf>,
    /// All in its namespaces. As the first of each is among them, no other can come after their end.
    processes: Vec<Process>,
}

/// Numbers are used again, and so are those of namespaces.
#[derive(Debug)]
struct Process {
    directory: PathBuf,
    name: String,
    started: String,
}

impl Process {
    fn at(directory: PathBuf) -> Option<Self> {
        let text = fs::read_to_string(directory.join("stat")).ok()?;
        let (start, rest) = text.rsplit_once(") ")?;
        Some(Self {
            name: start.split_once('(')?.1.to_owned(),
            started: rest.split(' ').nth(19)?.to_owned(),
            directory,
        })
    }

    fn lives(&self) -> bool {
        Self::at(self.directory.clone()).is_some_and(|now| now.started == self.started)
    }
}

impl Traces {
    /// Of a cluster that runs, by its administrator's kubeconfig.
    pub(crate) fn of(kubeconfig: &Path) -> Self {
        let directory = kubeconfig.ancestors().nth(2).unwrap().to_owned();
        let text = fs::read_to_string(kubeconfig).unwrap();
        let (_, rest) = text.split_once("https://198.19.").unwrap();
        let number = rest.split('.').next().unwrap();
        let interface = PathBuf::from(format!("/sys/class/net/branchpool{number}"));
        let cgroup = fs::read_to_string(directory.join("cgroup")).unwrap();
        let namespaces = namespaces(&directory.with_extension("lock"));
        assert_eq!(namespaces.len(), 6, "two of each of three spaces");
        let processes = processes().into_iter().filter(|process| {
            spaces_of(process)
                .iter()
                .any(|space| namespaces.contains(space))
        });
        let traces = Self {
            interface_index: fs::read_to_string(interface.join("ifindex")).unwrap(),
            interface,
            cgroups: hierarchies()
                .iter()
                .map(|root| root.join(&cgroup))
                .collect(),
            processes: processes.filter_map(Process::at).collect(),
            directory,
        };
        let found = traces.found();
        let has = |part: &str| found.iter().any(|trace| trace.contains(part));
        for part in [
            "directory",
            "interface",
            "cgroup",
            "loop device",
            "kubelet",
            "etcd",
        ] {
            assert!(has(part), "a cluster that runs has its {part}: {found:#?}");
        }
        traces
    }

    /// What is still there, after a while in which the kernel takes down what is unused.
    pub(crate) fn left(&self) -> Vec<String> {
        for _ in 0..1200 {
            if self.found().is_empty() {
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        self.found()
    }

    fn found(&self) -> Vec<String> {
        let mut found = Vec::new();
        for path in [
            self.directory.clone(),
            self.directory.with_extension("lock"),
        ] {
            if path.exists() {
                found.push(format!("directory {}", path.display()));
            }
        }
        let index = fs::read_to_string(self.interface.join("ifindex"));
        if index.is_ok_and(|index| index == self.interface_index) {
            found.push(format!("interface {}", self.interface.display()));
        }
        for cgroup in self.cgroups.iter().filter(|cgroup| cgroup.exists()) {
            found.push(format!("cgroup {}", cgroup.display()));
        }
        let inside = format!("{}/", self.directory.display());
        let files = ["--list", "--noheadings", "--output", "NAME,BACK-FILE"];
        let devices = Command::new("losetup").args(files).output().unwrap();
        let devices = String::from_utf8(devices.stdout).unwrap();
        for line in devices.lines().filter(|line| line.contains(&inside)) {
            found.push(format!("loop device {line}"));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        for line in mounts.lines().filter(|line| line.contains(&inside)) {
            found.push(format!("mount {line}"));
        }
        for process in self.processes.iter().filter(|process| process.lives()) {
            let place = process.directory.display();
            found.push(format!("process {place} {}", process.name));
        }
        found
    }
}

/// Those of the processes that hold the lock, but for this one's.
fn namespaces(lock: &Path) -> BTreeSet<PathBuf> {
    let own = spaces_of(Path::new("/proc/self"));
    let holds = |process: &PathBuf| {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten();
        files
            .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
            .any(|file| file == lock)
    };
    let all = processes().into_iter().filter(holds);
    all.flat_map(|process| spaces_of(&process))
        .filter(|space| !own.contains(space))
        .collect()
}

fn spaces_of(process: &Path) -> Vec<PathBuf> {
    let links = ["ns/pid", "ns/net"].map(|link| fs::read_link(process.join(link)));
    links.into_iter().flatten().collect()
}

fn processes() -> Vec<PathBuf> {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join("ns").exists() && !path.ends_with("self"))
        .collect()
}

fn hierarchies() -> BTreeSet<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    text.lines()
        .filter(|line| line.contains(" - cgroup"))
        .map(|line| PathBuf::from(line.split(' ').nth(4).unwrap()))
        .collect()
}
