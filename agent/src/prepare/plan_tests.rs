use proptest::{collection::vec, prelude::*};

use super::*;

const OURS: &str = "branchpool";
const A: Uuid = Uuid([1; 16]);
const B: Uuid = Uuid([2; 16]);

fn device(number: usize, content: Content) -> Device {
    Device {
        path: format!("/dev/nvme{number}n1").into(),
        content,
    }
}

fn devices(contents: impl IntoIterator<Item = Content>) -> Vec<Device> {
    let numbered = contents.into_iter().enumerate();
    numbered
        .map(|(number, content)| device(number, content))
        .collect()
}

fn member(filesystem: Uuid, device: u64, devices: u64) -> Content {
    Content::Btrfs(Member {
        filesystem,
        label: OURS.to_owned(),
        device,
        devices,
    })
}

fn unfinished() -> Content {
    Content::Unfinished {
        label: OURS.to_owned(),
    }
}

fn wanted(format: bool) -> Wanted {
    Wanted {
        mount_point: "/var/lib/branchpool".into(),
        label: OURS.to_owned(),
        count: None,
        format,
    }
}

fn refusal(contents: Vec<Content>, place: &Place, format: bool) -> String {
    plan(&devices(contents), place, &wanted(format))
        .unwrap_err()
        .to_string()
}

#[test]
fn blank_devices_are_formatted_when_that_is_allowed() {
    for (contents, data, metadata) in [
        (vec![Content::Blank], "single", "dup"),
        (vec![Content::Blank, Content::Blank], "raid0", "raid1"),
        (
            vec![Content::Blank, unfinished(), Content::Blank],
            "raid0",
            "raid1",
        ),
    ] {
        let devices = devices(contents);
        let plan = plan(&devices, &Place::Empty, &wanted(true)).unwrap();
        assert_eq!(
            plan,
            Plan::Format(paths(&devices), Profiles { data, metadata })
        );
    }
    let refused = refusal(vec![Content::Blank; 2], &Place::Empty, false);
    assert!(
        refused.contains("are blank (/dev/nvme0n1 /dev/nvme1n1)"),
        "{refused}"
    );
    assert!(refused.contains("--format"), "{refused}");
}

#[test]
fn a_set_that_was_made_before_is_mounted_whatever_the_order() {
    let two = devices([member(A, 2, 2), member(A, 1, 2)]);
    for format in [false, true] {
        let decide = |place| plan(&two, &place, &wanted(format));
        assert_eq!(decide(Place::Empty), Ok(Plan::Mount(paths(&two))));
        assert_eq!(decide(Place::Mounted(A)), Ok(Plan::Ready));
        let refused = decide(Place::Taken).unwrap_err().to_string();
        assert!(
            refused.contains("/var/lib/branchpool is not empty"),
            "{refused}"
        );
        assert!(decide(Place::Mounted(B)).is_err());
    }
}

#[test]
fn a_blank_device_beside_a_complete_set_is_left_alone() {
    let found = devices([member(A, 1, 1), Content::Blank]);
    let plan = plan(&found, &Place::Empty, &wanted(true)).unwrap();
    assert_eq!(plan, Plan::Mount(vec!["/dev/nvme0n1".into()]));
}

#[test]
fn an_incomplete_set_is_refused_and_says_what_to_do() {
    let refused = refusal(
        vec![member(A, 1, 3), Content::Blank, member(A, 3, 3)],
        &Place::Empty,
        true,
    );
    for words in [
        "on 3 devices and only 2 of them were found (/dev/nvme0n1 /dev/nvme2n1)",
        "besides /dev/nvme1n1, not part of it",
        "wipefs --all /dev/nvme0n1 /dev/nvme2n1",
    ] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
}

#[test]
fn two_sets_and_copies_are_refused() {
    let refused = refusal(vec![member(A, 1, 1), member(B, 1, 1)], &Place::Empty, true);
    assert!(refused.contains("belong to 2 filesystems"), "{refused}");
    let refused = refusal(vec![member(A, 1, 2), member(A, 1, 2)], &Place::Empty, true);
    assert!(refused.contains("are the same device"), "{refused}");
}

#[test]
fn everything_foreign_is_named_at_once() {
    let theirs = Content::Btrfs(Member {
        filesystem: A,
        label: "home".to_owned(),
        device: 1,
        devices: 1,
    });
    let half = Content::Unfinished {
        label: "home".to_owned(),
    };
    let other = Content::Other("signatures of ext4".to_owned());
    let refused = refusal(
        vec![theirs, Content::Blank, other, half],
        &Place::Empty,
        true,
    );
    for words in [
        "nothing was touched",
        "/dev/nvme0n1 has a Btrfs filesystem with the label \"home\"",
        "/dev/nvme2n1 has signatures of ext4",
        "/dev/nvme3n1 has an unfinished Btrfs filesystem",
        "wipefs --all /dev/nvme0n1 /dev/nvme2n1 /dev/nvme3n1",
    ] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
}

#[test]
fn the_number_of_devices_is_checked_first() {
    let mut wanted = wanted(true);
    assert_eq!(plan(&[], &Place::Empty, &wanted), Err(Refusal::NoDevices));
    wanted.count = Some(4);
    let refused = plan(
        &devices([Content::Blank, Content::Blank]),
        &Place::Empty,
        &wanted,
    );
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.starts_with("2 devices were found and 4 are wanted"),
        "{refused}"
    );
}

#[test]
fn a_mount_point_in_use_is_not_hidden() {
    let refused = refusal(vec![Content::Blank], &Place::Taken, true);
    assert!(refused.contains("it would be hidden"), "{refused}");
}

fn any_content() -> impl Strategy<Value = Content> {
    let filesystem = prop_oneof![Just(A), Just(B)];
    let label = prop_oneof![Just(OURS), Just("home")].prop_map(str::to_owned);
    prop_oneof![
        4 => Just(Content::Blank),
        4 => (filesystem, label.clone(), 1_u64..4, 1_u64..4).prop_map(|(filesystem, label, device, devices)| {
            Content::Btrfs(Member { filesystem, label, device, devices })
        }),
        1 => label.prop_map(|label| Content::Unfinished { label }),
        1 => Just(Content::Other("data".to_owned())),
    ]
}

fn any_place() -> impl Strategy<Value = Place> {
    prop_oneof![
        Just(Place::Empty),
        Just(Place::Taken),
        Just(Place::Mounted(A)),
        Just(Place::Mounted(B)),
    ]
}

proptest! {
    #[test]
    fn nothing_but_blank_and_unfinished_devices_is_ever_formatted(
        contents in vec(any_content(), 0..5),
        place in any_place(),
        format: bool,
    ) {
        let found = devices(contents);
        if let Ok(Plan::Format(chosen, _)) = plan(&found, &place, &wanted(format)) {
            prop_assert!(format);
            prop_assert_eq!(&place, &Place::Empty);
            prop_assert_eq!(chosen, paths(&found));
            for device in &found {
                prop_assert!(device.content == Content::Blank || device.content == unfinished());
            }
        }
    }

    #[test]
    fn what_is_mounted_is_one_whole_set(contents in vec(any_content(), 0..5), place in any_place()) {
        let found = devices(contents);
        if let Ok(Plan::Mount(chosen)) = plan(&found, &place, &wanted(true)) {
            prop_assert_eq!(place, Place::Empty);
            let members: Vec<_> = found.iter().filter(|device| chosen.contains(&device.path)).collect();
            let mut most = 0;
            for device in members {
                let Content::Btrfs(member) = &device.content else {
                    return Err(TestCaseError::fail("not a member"));
                };
                prop_assert_eq!(&member.label, OURS);
                most = most.max(member.devices);
            }
            // Members may differ in their word, as after an interrupted change of the set.
            prop_assert_eq!(usize::try_from(most), Ok(chosen.len()));
        }
    }
}
