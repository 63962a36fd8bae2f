//! Programs of the distribution that make, probe and attach filesystems. Every function blocks.

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use snafu::{OptionExt, ResultExt, Snafu};

/// Daemons and unprivileged shells often lack the sbin directories.
const TOOL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{tool} is not installed; install the Debian package {package}"))]
    Missing {
        tool: &'static str,
        package: &'static str,
    },
    #[snafu(display("cannot run {tool}: {source}"))]
    NotRun {
        tool: &'static str,
        source: io::Error,
    },
    #[snafu(display("{tool} failed for {path:?}: {message}"))]
    Failed {
        tool: &'static str,
        path: PathBuf,
        message: String,
    },
}

#[derive(Clone, Copy)]
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

impl Tool {
    pub(crate) const MKFS: Self = Self {
        name: "mkfs.btrfs",
        package: "btrfs-progs",
    };

    /// Runs it and returns what it printed. The paths, at least one, are absolute, so none looks like an
    /// option.
    pub(crate) fn run(self, options: &[&str], paths: &[&Path]) -> Result<String, Error> {
        let Self {
            name: tool,
            package,
        } = self;
        let result = Command::new(tool)
            .args(options)
            .args(paths)
            .env("PATH", TOOL_PATH)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output();
        let output = match result {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return MissingSnafu { tool, package }.fail();
            }
            other => other.context(NotRunSnafu { tool })?,
        };
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let path = paths.first().context(MissingSnafu { tool, package })?;
        let text = String::from_utf8_lossy(&output.stderr);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut message: String = lines
            .collect::<Vec<_>>()
            .join("; ")
            .chars()
            .take(500)
            .collect();
        if message.is_empty() {
            message = output.status.to_string();
        }
        FailedSnafu {
            tool,
            path: *path,
            message,
        }
        .fail()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_names_its_package() {
        let tool = Tool {
            name: "mkfs.of-no-filesystem",
            package: "some-progs",
        };
        let error = tool.run(&[], &[Path::new("/")]).unwrap_err();
        let expected =
            "mkfs.of-no-filesystem is not installed; install the Debian package some-progs";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_failing_tool_is_quoted() {
        let tool = Tool {
            name: "losetup",
            package: "mount",
        };
        let error = tool
            .run(&["--no-such-option"], &[Path::new("/")])
            .unwrap_err();
        assert!(error.to_string().contains("--no-such-option"), "{error}");
    }
}
