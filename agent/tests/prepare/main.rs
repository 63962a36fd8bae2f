//! Preparation of a node, with the real program, on loop devices. Needs root and btrfs-progs.

#![allow(clippy::unwrap_used)]

mod disks;

use std::{
    fs,
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use branchpool_agent::prepare::superblock;

use disks::{Disks, SIZE, run};

/// Profiles of the block groups, as `btrfs filesystem df` prints them.
fn profiles(mount_point: &Path) -> String {
    let output = run("btrfs", &["filesystem", "df"], &[mount_point]);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn blank_disks_become_one_filesystem_that_is_found_again() {
    let disks = Disks::new(2);
    let place = disks.mount_point();
    let refused = disks.refused(&[]);
    assert!(refused.contains("allow it with --format"), "{refused}");
    let told = disks.prepared(&["--format", "--dry-run"]);
    assert!(
        told.contains("make it (data raid0, metadata raid1)"),
        "{told}"
    );
    assert!(!place.exists());

    disks.prepared(&["--format", "--count", "2"]);
    let found = profiles(&place);
    assert!(
        found.contains("Data, RAID0") && found.contains("Metadata, RAID1"),
        "{found}"
    );
    let checked = Command::new(env!("CARGO_BIN_EXE_branchpool-agent"))
        .args(["preflight", "--root"])
        .arg(&place)
        .output()
        .unwrap();
    assert!(checked.status.success(), "{checked:?}");
    assert!(
        !String::from_utf8_lossy(&checked.stdout).contains("warning"),
        "{checked:?}"
    );

    fs::write(place.join("kept"), "kept").unwrap();
    let before = disks.mounts();
    let told = disks.prepared(&["--format"]);
    assert!(
        told.contains("is mounted") && told.contains("already"),
        "{told}"
    );
    assert_eq!(disks.mounts(), before);

    // As after a reboot.
    disks.unmount();
    disks.prepared(&[]);
    assert_eq!(fs::read_to_string(place.join("kept")).unwrap(), "kept");
}

#[test]
fn one_disk_keeps_its_metadata_twice() {
    let disks = Disks::new(1);
    disks.prepared(&["--format", "--label", "ssd"]);
    let found = profiles(&disks.mount_point());
    assert!(
        found.contains("Data, single") && found.contains("Metadata, DUP"),
        "{found}"
    );
    disks.unmount();
    let refused = disks.refused(&["--format"]);
    assert!(
        refused.contains("a Btrfs filesystem with the label \"ssd\""),
        "{refused}"
    );
}

#[test]
fn a_disk_with_data_is_never_touched() {
    type Fill = fn(&Disks);
    let cases: [(&str, Fill); 8] = [
        ("signatures of swap", |disks| {
            run("mkswap", &[], &[disks.device(0)]);
        }),
        ("signatures of dos", |disks| {
            // One partition of 512 KiB at 1 MiB.
            disks.write(0, 446, &[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 4, 0, 0]);
            disks.write(0, 510, &[0x55, 0xaa]);
        }),
        ("signatures of ext4", |disks| {
            run("mkfs.ext4", &["-q"], &[disks.device(0)]);
        }),
        ("a Btrfs filesystem with the label \"theirs\"", |disks| {
            run("mkfs.btrfs", &["-q", "-L", "theirs"], &[disks.device(0)]);
        }),
        (
            "an unfinished Btrfs filesystem with the label \"theirs\"",
            |disks| {
                run("mkfs.btrfs", &["-q", "-L", "theirs"], &[disks.device(0)]);
                disks.write(0, superblock::OFFSET + 0x40, b"!");
            },
        ),
        ("data of no known kind in its first MiB", |disks| {
            disks.write(0, (1 << 20) - 1, b"x");
        }),
        ("data of no known kind in its last MiB", |disks| {
            disks.write(0, SIZE - (1 << 20), b"x");
        }),
        ("signatures of crypto_LUKS", |disks| {
            disks.write(0, 0, b"LUKS\xba\xbe\0\x01");
        }),
    ];
    for (says, fill) in cases {
        let disks = Disks::new(2);
        fill(&disks);
        let refused = disks.refused(&["--format"]);
        assert!(refused.contains(says), "{says}: {refused}");
        let device = disks.device(0).display();
        assert!(
            refused.contains(&format!("wipefs --all {device}\n")),
            "{refused}"
        );
    }
}

/// As a mount, swap or a RAID set uses it.
#[test]
fn a_disk_in_use_is_never_touched() {
    let disks = Disks::new(1);
    let exclusive = fs::File::options()
        .read(true)
        .custom_flags(i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap())
        .open(disks.device(0))
        .unwrap();
    let refused = disks.refused(&["--format"]);
    assert!(
        refused.contains("a user: it is mounted, swap, or part of a set"),
        "{refused}"
    );
    drop(exclusive);
    disks.prepared(&["--format"]);
}

#[test]
fn a_set_without_one_of_its_disks_is_refused() {
    let mut disks = Disks::new(3);
    disks.prepared(&["--format"]);
    disks.unmount();
    disks.pull_out(1);
    let refused = disks.refused(&["--format"]);
    assert!(
        refused.contains("is on 3 devices and only 2 of them were found"),
        "{refused}"
    );
    disks.plug_in(1);
    disks.prepared(&[]);
}

#[test]
fn what_is_at_the_mount_point_is_not_hidden() {
    let disks = Disks::new(1);
    fs::create_dir_all(disks.mount_point().join("somebody's")).unwrap();
    let refused = disks.refused(&["--format"]);
    assert!(refused.contains("is not empty"), "{refused}");
}

#[test]
fn a_pattern_that_finds_nothing_or_something_else_is_refused() {
    let disks = Disks::new(1);
    let refused = disks.refused(&["--count", "2"]);
    assert!(
        refused.contains("1 devices were found and 2 are wanted"),
        "{refused}"
    );
    let file = disks.file(0);
    let refused = disks.refused(&["--devices", file.to_str().unwrap()]);
    assert!(refused.contains("is no block device"), "{refused}");
    let output = Command::new(env!("CARGO_BIN_EXE_branchpool-agent"))
        .args(["prepare-node", "--devices", "/dev/no-such-disk-*"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("no device was found"));
}

#[test]
fn killed_at_any_time_it_does_the_rest_the_next_time() {
    let disks = Disks::new(2);
    let mut killed = 0;
    for pause in 0..12 {
        let mut child = disks
            .command(&["--format"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(4 * pause));
        let _has_ended = child.kill();
        killed += usize::from(child.wait().unwrap().signal().is_some());
    }
    assert!(killed > 0);
    let told = disks.prepared(&["--format"]);
    assert!(told.contains("branchpool"), "{told}");
    assert_eq!(disks.mounts().len(), 1);
}

#[test]
fn what_a_killed_mkfs_left_is_made_anew() {
    let disks = Disks::new(2);
    disks.prepared(&["--format"]);
    disks.unmount();
    for number in 0..2 {
        disks.write(number, superblock::OFFSET + 0x40, b"!");
    }
    let told = disks.prepared(&["--format"]);
    assert!(told.contains("make it"), "{told}");
}
