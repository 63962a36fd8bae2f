//! What must be so in the end.

use std::{collections::BTreeMap, fs};

use super::Chaos;
use crate::{
    inspect::{Inventory, journal},
    node::cgroups,
};

impl Chaos {
    /// Lets everything come to rest, and looks at all that is left.
    pub(super) async fn settle(mut self) {
        // Strays are looked for at the start.
        self.node.wait_serving().await;
        self.kill_manager();
        self.node.wait_serving().await;
        self.check_data().await;
        let held = u32::try_from(self.held.len()).unwrap();
        let status = self
            .node
            .wait_pool("items", |pool| {
                pool.ready == self.replicas
                    && pool.desired == self.replicas
                    && pool.leased == held
                    && pool.warming + pool.cleaning + pool.tombstones == 0
            })
            .await;
        self.check_cheaply().await;
        self.check_data().await;
        self.check_strays().await;

        let in_trash = |path: &&String| path.starts_with("trash/");
        let strays = self.strays.keys().filter(in_trash).count();
        let branches = (self.replicas + held) as usize;
        let mut inventory = Inventory::settled(&self.node, branches, strays);
        inventory.forget(self.strays.keys().map(String::as_str));
        let named = self.node.client.node().await.unwrap().quarantined;
        let kept: Vec<String> = named
            .into_iter()
            .filter(|entry| !self.strays.contains_key(&entry.path))
            .map(|entry| entry.path.rsplit_once('/').unwrap().1.to_owned())
            .collect();
        assert_eq!(kept.len(), status.quarantined as usize, "{kept:?}");
        for id in &kept {
            assert!(inventory.branches.remove(id), "{id} is named and not there");
            assert!(inventory.logs.remove(&format!("{id}.log")), "log of {id}");
        }
        inventory.assert_tidy(branches);
        for held in self.held.values() {
            assert!(inventory.branches.contains(&held.lease.branch));
            assert!(inventory.addresses.contains(&held.lease.endpoint));
        }

        let groups = cgroups(&self.node);
        assert!(self.node.stop().success(), "{}", self.node.log());
        self.node.assert_nothing_left();
        assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
        self.check_journal(&kept);
    }

    async fn check_strays(&self) {
        let named = self.node.client.node().await.unwrap().quarantined;
        for (path, subvolume) in &self.strays {
            let count = named.iter().filter(|entry| entry.path == *path).count();
            assert_eq!(count, 1, "{path} in {named:#?}");
            let full = self.node.root().join(path);
            let file = if *subvolume {
                full.join("content")
            } else {
                full
            };
            assert_eq!(fs::read_to_string(file).unwrap(), *path);
        }
    }

    /// After a stop in order only leased and quarantined branches are recorded.
    fn check_journal(&self, quarantined: &[String]) {
        let journal = journal(&self.node);
        let of = |kind: &str| {
            let records = journal.iter().filter(|((found, _), _)| found == kind);
            let records = records.map(|((_, key), value)| (key.clone(), value.clone()));
            records.collect::<BTreeMap<String, serde_json::Value>>()
        };
        let mut branches = of("branch");
        for id in quarantined {
            let stage = branches.remove(id).map(|record| record["stage"].clone());
            assert!(
                stage.is_some_and(|stage| stage["Quarantined"].is_object()),
                "{id}"
            );
        }
        let leases = of("lease");
        let bound = leases.iter().filter(|(_, lease)| lease["phase"] == "Bound");
        assert_eq!(bound.count(), self.held.len(), "{leases:#?}");
        for (uid, held) in &self.held {
            assert_eq!(leases[uid]["branch"], *held.lease.branch);
            assert_eq!(leases[uid]["endpoint"], *held.lease.endpoint);
            let record = branches.remove(&held.lease.branch).unwrap();
            assert_eq!(record["stage"]["Leased"]["lease"], **uid);
            assert_eq!(record["stage"]["Leased"]["parked"], true);
            assert_eq!(record["endpoint"], *held.lease.endpoint);
        }
        assert!(
            branches.is_empty(),
            "recorded, but nothing is there: {branches:#?}"
        );
        let generations = of("generation");
        assert_eq!(generations.len(), 1, "{generations:#?}");
        assert!(
            generations
                .values()
                .all(|record| record["image"].is_object())
        );
        assert_eq!(of("pool").len(), 1);
    }
}
