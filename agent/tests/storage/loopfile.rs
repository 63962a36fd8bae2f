//! The filesystem in a file.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use branchpool_agent::storage::loopfile::{Error, LoopFile};

use crate::{LoopBtrfs, SIZE};

#[test]
fn loop_file_is_made_once_and_attached_once() {
    let btrfs = LoopBtrfs::new(SIZE);
    fs::write(btrfs.root().join("kept"), "kept").unwrap();
    let image = btrfs.outside().join("image");
    let loops = |image: &Path| {
        let output = Command::new("losetup")
            .arg("-j")
            .arg(image)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().lines().count()
    };
    assert_eq!(loops(&image), 1);

    // Again, elsewhere, and from many threads at once: the same filesystem each time.
    LoopFile::mount(&image, SIZE, btrfs.root()).unwrap();
    let elsewhere: Vec<PathBuf> = (0..4)
        .map(|number| btrfs.outside().join(format!("m{number}")))
        .collect();
    let mounts: Vec<LoopFile> = thread::scope(|scope| {
        let threads: Vec<_> = elsewhere
            .iter()
            .map(|path| scope.spawn(|| LoopFile::mount(&image, SIZE, path).unwrap()))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(loops(&image), 1);
    for mount in &mounts {
        assert_eq!(
            fs::read_to_string(mount.mount_point().join("kept")).unwrap(),
            "kept"
        );
        mount.unmount().unwrap();
        mount.unmount().unwrap();
    }
    assert_eq!(loops(&image), 1);
}

#[test]
fn loop_file_survives_a_remount_and_clears_itself() {
    let directory = tempfile::tempdir().unwrap();
    let (image, point) = (
        directory.path().join("deep/image"),
        directory.path().join("point"),
    );
    let loop_file = LoopFile::mount(&image, SIZE, &point).unwrap();
    fs::write(point.join("kept"), "kept").unwrap();
    let held = fs::File::open(point.join("kept")).unwrap();
    assert!(
        loop_file
            .unmount()
            .unwrap_err()
            .to_string()
            .contains("fuser")
    );
    drop(held);
    loop_file.unmount().unwrap();
    // Another size is not applied to an image that exists.
    let again = LoopFile::mount(&image, 2 * SIZE, &point).unwrap();
    let kept = fs::read_to_string(point.join("kept"));
    let size = fs::metadata(&image).unwrap().len();
    again.unmount().unwrap();
    assert_eq!(kept.unwrap(), "kept");
    assert_eq!(size, SIZE);
}

#[test]
fn partly_made_image_is_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (image, point) = (
        directory.path().join("image"),
        directory.path().join("point"),
    );
    let partial = directory.path().join("image.partial");
    fs::write(&partial, vec![1; 1 << 20]).unwrap();
    let loop_file = LoopFile::mount(&image, SIZE, &point).unwrap();
    let left = partial.exists();
    loop_file.unmount().unwrap();
    assert!(!left);
}

#[test]
fn loop_file_refuses_what_it_did_not_make() {
    let directory = tempfile::tempdir().unwrap();
    let (image, point) = (
        directory.path().join("image"),
        directory.path().join("point"),
    );
    let error = LoopFile::mount(&image, 1 << 20, &point).unwrap_err();
    assert!(matches!(error, Error::TooSmall { .. }), "{error}");
    assert!(!image.exists());
    fs::write(&image, vec![b'x'; 1 << 20]).unwrap();
    let error = LoopFile::mount(&image, SIZE, &point).unwrap_err();
    assert!(matches!(error, Error::NotAnImage { .. }), "{error}");
    assert_eq!(fs::read(&image).unwrap(), vec![b'x'; 1 << 20]);

    let btrfs = LoopBtrfs::new(SIZE);
    let other = directory.path().join("other");
    let error = LoopFile::mount(&other, SIZE, btrfs.root()).unwrap_err();
    assert!(matches!(error, Error::MountPointTaken { .. }), "{error}");
}
