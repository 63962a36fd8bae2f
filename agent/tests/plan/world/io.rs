//! What actions do outside the node, and what a crash leaves of it.

use super::*;

impl World {
    /// Does the IO of an action. `told` is false when the agent dies before it hears of it.
    pub(super) fn perform(
        &mut self,
        action: Action,
        success: bool,
        told: bool,
    ) -> Option<Completion> {
        let failed = || Failure {
            reason: "Injected".into(),
            message: "injected failure".into(),
        };
        match action {
            Action::Build {
                pool, generation, ..
            } => {
                let result = if success {
                    self.golden.insert((pool.clone(), generation));
                    Ok(Image {
                        bytes: 1,
                        database: format!("shop-{generation}"),
                        role: "shop".into(),
                        facts: serde_json::Value::Null,
                    })
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::Built {
                    pool,
                    generation,
                    result,
                })
            }
            Action::DropGolden {
                pool,
                generation,
                id,
            } => {
                let used = self.branches.keys().any(|id| {
                    self.journal.branches.get(id).is_some_and(|branch| {
                        branch.generation == generation && !matches!(branch.stage, Stage::Stopping)
                    })
                });
                assert!(
                    !used || !success,
                    "image {generation} dropped while branches use it"
                );
                if success && self.golden.remove(&(pool.clone(), generation)) {
                    self.trash.insert(id);
                }
                let result = if success {
                    Ok(())
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::GoldenDropped {
                    pool,
                    generation,
                    id,
                    result,
                })
            }
            Action::Snapshot {
                branch,
                pool,
                generation,
                ..
            } => {
                if success {
                    assert!(
                        self.golden.contains(&(pool, generation)),
                        "snapshot of nothing"
                    );
                    let before = self.branches.insert(branch, OnDisk::default());
                    assert!(
                        before.is_none() && !self.trash.contains(&branch),
                        "id used twice"
                    );
                }
                let result = if success { Ok(()) } else { Err(failed()) };
                Some(Completion::Snapshotted { branch, result })
            }
            Action::Start { branch, .. } => {
                let result = self.run(branch, success).map_err(|()| failed());
                Some(Completion::Started { branch, result })
            }
            Action::Restart { branch, .. } => {
                let result = self.run(branch, success).map_err(|()| failed());
                Some(Completion::Restarted { branch, result })
            }
            Action::Preconnect { branch, .. } => {
                let running = self.branches.get(&branch).is_some_and(|disk| disk.running);
                let result = if success && running {
                    Ok(())
                } else {
                    Err(failed())
                };
                Some(Completion::Preconnected { branch, result })
            }
            // In use if it is said to fail.
            Action::LookIdle { branch } => Some(Completion::Looked {
                branch,
                found: Use {
                    open: !success,
                    last: None,
                },
            }),
            Action::Suspend { branch, .. } => {
                let result = if success {
                    if let Some(disk) = self.branches.get_mut(&branch) {
                        *disk = OnDisk::default();
                    }
                    Ok(Suspension::Asleep)
                } else if self.now.mono.is_multiple_of(2) {
                    Ok(Suspension::Used)
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::Suspended { branch, result })
            }
            Action::Stop { branch, after, .. } => {
                if !success {
                    let result = Err("injected failure".into());
                    return Some(Completion::Stopped { branch, result });
                }
                if let Some(disk) = self.branches.get_mut(&branch) {
                    *disk = OnDisk::default();
                }
                if after == After::Trash && self.branches.remove(&branch).is_some() {
                    self.trash.insert(branch);
                }
                Some(Completion::Stopped {
                    branch,
                    result: Ok(Stopped {
                        bytes: 1,
                        clean: true,
                    }),
                })
            }
            Action::Delete { id, .. } => {
                assert!(
                    id.is_authentic(&NodeKey::from_bytes(KEY)),
                    "{id} is not ours to delete"
                );
                assert!(
                    !self.branches.contains_key(&id),
                    "{id} deleted from among the branches"
                );
                if success {
                    self.trash.remove(&id);
                }
                let result = if success {
                    Ok(())
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::Deleted { id, result })
            }
            Action::Journal {
                entries,
                links,
                reply,
            } => {
                self.write(entries);
                for link in links {
                    match link {
                        LinkChange::Point { endpoint, branch } => {
                            self.links.insert(endpoint, branch);
                        }
                        LinkChange::Remove { endpoint } => {
                            self.links.remove(&endpoint);
                        }
                    }
                }
                if told && let Some((token, answer)) = reply {
                    self.answer(token, *answer);
                }
                None
            }
            Action::CancelBuild { .. } => None,
            other => unreachable!("{other:?} is not pending"),
        }
    }

    fn run(&mut self, branch: BranchId, success: bool) -> Result<(), ()> {
        let disk = self.branches.get_mut(&branch).ok_or(())?;
        if !success {
            return Err(());
        }
        *disk = OnDisk {
            running: true,
            ready: true,
        };
        Ok(())
    }

    fn answer(&mut self, token: Token, answer: Answer) {
        let Answer::Lease { uid, lease, .. } = answer else {
            return;
        };
        let Some(asked) = self.waiting.remove(&token) else {
            return;
        };
        assert_eq!(asked, uid, "the answer went to another caller");
        let now = self.node.leases.get(&uid);
        if now.is_some_and(|now| now.endpoint != lease.endpoint) && self.ended.contains(&uid) {
            // A late answer about a lease that has ended; its uid is another's by now.
            return;
        }
        if now.is_none_or(|now| now.branch == lease.branch) {
            self.moving.remove(&uid);
        }
        if lease.phase == LeasePhase::Bound {
            let was = self
                .answered
                .insert(uid.clone(), (lease.branch, lease.endpoint));
            // A forgotten lease's uid may be used again, for another lease.
            let anew = self.ended.contains(&uid);
            if now.is_some_and(LeaseState::is_bound) {
                self.ended.remove(&uid);
            }
            if let Some((_, endpoint)) = was
                && !anew
            {
                assert_eq!(endpoint, lease.endpoint, "the address of {uid} changed");
            }
        } else {
            self.ended.insert(uid);
        }
    }

    fn write(&mut self, entries: Vec<Entry>) {
        let journal = &mut self.journal;
        for entry in entries {
            match entry {
                Entry::Pool(uid, record) => drop(journal.pools.insert(uid, *record)),
                Entry::PoolGone(uid) => drop(journal.pools.remove(&uid)),
                Entry::Generation(uid, number, record) => {
                    drop(journal.generations.insert((uid, number), record));
                }
                Entry::GenerationGone(uid, number) => {
                    drop(journal.generations.remove(&(uid, number)));
                }
                Entry::Branch(id, record) => drop(journal.branches.insert(id, record)),
                Entry::BranchGone(id) => drop(journal.branches.remove(&id)),
                Entry::Lease(uid, record) => drop(journal.leases.insert(uid, *record)),
                Entry::LeaseGone(uid) => drop(journal.leases.remove(&uid)),
                Entry::Epoch(epoch) => journal.epoch = epoch,
                Entry::Boot(_) => {}
            }
        }
    }

    /// The agent dies. Of the actions under way, those in `done` were carried out, untold.
    pub fn crash(&mut self, done: u64, reboot: bool) {
        let pending = std::mem::take(&mut self.pending);
        let mut journal_stopped = false;
        for (index, action) in pending.into_iter().enumerate() {
            let carried_out = done >> (index % 64) & 1 == 1;
            let in_order = !needs_order(&action) || !journal_stopped;
            if carried_out && in_order {
                let _ = self.perform(action, true, false);
            } else if writes_journal(&action) {
                journal_stopped = true;
            }
        }
        self.waiting.clear();
        self.unheard.clear();
        if reboot {
            for disk in self.branches.values_mut() {
                *disk = OnDisk::default();
            }
        }
        let rebooted = reboot;
        let observed = Observed {
            branches: self
                .branches
                .iter()
                .map(|(id, disk)| {
                    (
                        *id,
                        ObservedBranch {
                            running: disk.running,
                            ready: disk.ready,
                        },
                    )
                })
                .collect(),
            tombstones: self.trash.clone(),
            golden: self.golden.clone(),
            strays: self
                .foreign
                .iter()
                .map(|path| Quarantined {
                    path: path.clone(),
                    reason: "Unknown".into(),
                    message: String::new(),
                })
                .collect(),
            rebooted,
            boot_id: self.seed.to_string(),
        };
        if reboot {
            let lost = self.journal.leases.iter().filter(|(_, lease)| {
                lease.phase == LeasePhase::Bound
                    && !self
                        .journal
                        .branches
                        .get(&lease.branch)
                        .is_some_and(|branch| {
                            matches!(branch.stage, Stage::Leased { parked: true, .. })
                        })
            });
            self.ended.extend(lost.map(|(uid, _)| uid.clone()));
        }
        self.seed += 1;
        self.now.mono += 7;
        self.now.wall += 7;
        let (node, effects) = Node::adopt(
            self.limits,
            NodeKey::from_bytes(KEY),
            StdRng::seed_from_u64(self.seed),
            self.journal.clone(),
            observed,
            self.now,
        );
        self.node = node;
        self.drained = false;
        self.take(effects);
        self.note_expired();
    }
}
