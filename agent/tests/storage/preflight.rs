//! The check of a storage directory.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use branchpool_agent::preflight::filesystem::{self, Warning};

use crate::{LoopBtrfs, SIZE, create_subvolume};

#[test]
fn preflight_accepts_a_btrfs_and_leaves_nothing() {
    let btrfs = LoopBtrfs::new(SIZE);
    // As an interrupted check leaves it.
    create_subvolume(&btrfs.root().join(".branchpool-preflight"));
    let report = filesystem::check(btrfs.root()).unwrap();
    assert_eq!(report.warnings, []);
    assert!(
        report
            .mount_options
            .iter()
            .any(|option| option == "noatime")
    );
    assert_eq!(fs::read_dir(btrfs.root()).unwrap().count(), 0);

    let remount = |options: &str| {
        let status = Command::new("mount")
            .args(["-o", options])
            .arg(btrfs.root())
            .status();
        assert!(status.unwrap().success());
    };
    remount("remount,strictatime,autodefrag");
    let report = filesystem::check(btrfs.root()).unwrap();
    assert_eq!(report.warnings, [Warning::AccessTimes, Warning::AutoDefrag]);

    remount("remount,ro");
    let error = filesystem::check(btrfs.root()).unwrap_err();
    assert!(
        matches!(error, filesystem::Error::ReadOnly { .. }),
        "{error}"
    );
    assert_eq!(error.exit_code(), 78);
}

#[test]
fn preflight_refuses_clearly() {
    let btrfs = LoopBtrfs::new(SIZE);
    let error = filesystem::check(&btrfs.outside().join("nowhere")).unwrap_err();
    assert!(
        matches!(error, filesystem::Error::Missing { .. }),
        "{error}"
    );
    let error = filesystem::check(Path::new("/proc")).unwrap_err();
    assert!(
        matches!(&error, filesystem::Error::NotBtrfs { filesystem, .. } if filesystem == "proc")
    );
    assert_eq!(error.exit_code(), 78);
    fs::set_permissions(btrfs.root(), fs::Permissions::from_mode(0o700)).unwrap();
    let error = filesystem::check(btrfs.root()).unwrap_err();
    assert!(
        matches!(error, filesystem::Error::NotSearchable { mode: 0o700, .. }),
        "{error}"
    );
}

/// Runs the check in a process of its own that `setpriv` takes privileges from.
fn unprivileged_check(root: &Path, privileges: &[&str]) -> String {
    let output = Command::new("setpriv")
        .args(privileges)
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "preflight::helper_unprivileged_check",
            "--ignored",
            "--nocapture",
        ])
        .env("BRANCHPOOL_TEST_ROOT", root)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn preflight_says_when_a_privilege_is_missing() {
    let btrfs = LoopBtrfs::new(SIZE);
    let another_user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let text = unprivileged_check(btrfs.root(), &another_user);
    assert!(
        text.contains("exit code 77: no permission for creating a subvolume"),
        "{text}"
    );

    let without_admin = ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"];
    let text = unprivileged_check(btrfs.root(), &without_admin);
    assert!(
        text.contains("exit code 77: no permission for deleting a subvolume"),
        "{text}"
    );
    assert_eq!(fs::read_dir(btrfs.root()).unwrap().count(), 0);
}

/// Run by the test above.
#[test]
#[ignore = "part of another test"]
fn helper_unprivileged_check() {
    let root = std::env::var_os("BRANCHPOOL_TEST_ROOT").unwrap();
    let error = filesystem::check(Path::new(&root)).unwrap_err();
    println!("exit code {}: {error}", error.exit_code());
}
