use proptest::prelude::*;

use super::*;

fn node(name: &str, room: u32) -> Candidate {
    Candidate {
        name: name.into(),
        standing: Standing::Eligible,
        room,
        held: 0,
        existing: 0,
        in_force: None,
    }
}

fn demand(replicas: u32, max_branches: u32, placement: Placement) -> Demand {
    Demand {
        replicas,
        max_branches,
        placement,
    }
}

fn hold(replicas: u32, max_branches: u32) -> Order {
    Order::Hold(Share {
        replicas,
        max_branches,
    })
}

/// Told, and everything made.
fn settle(nodes: &mut [Candidate], orders: &BTreeMap<NodeName, Order>) {
    for node in nodes {
        match orders.get(&node.name) {
            Some(Order::Hold(share)) => {
                let leased = node.existing - node.held;
                node.in_force = Some(*share);
                let fits = share.max_branches.saturating_sub(leased);
                node.held = share.replicas.min(fits);
                node.existing = leased + node.held;
            }
            Some(Order::Remove) => {
                node.existing -= node.held;
                node.held = 0;
                node.in_force = None;
            }
            None => {}
        }
    }
}

fn orders(demand: Demand, nodes: &[Candidate]) -> Vec<(String, Order)> {
    let orders = place(demand, nodes).unwrap();
    orders
        .into_iter()
        .map(|(name, order)| (name.to_string(), order))
        .collect()
}

#[test]
fn spreads_evenly_and_packs_one_after_the_other() {
    let nodes = [node("a", 100), node("b", 100), node("c", 10)];
    assert_eq!(
        orders(demand(41, 101, Placement::Spread), &nodes),
        [
            ("a".to_owned(), hold(16, 46)),
            ("b".to_owned(), hold(15, 45)),
            ("c".to_owned(), hold(10, 10)),
        ]
    );
    assert_eq!(
        orders(demand(41, 101, Placement::Pack), &nodes),
        [
            ("a".to_owned(), hold(41, 100)),
            ("b".to_owned(), hold(0, 1))
        ]
    );
}

#[test]
fn no_node_to_go_to_changes_nothing() {
    assert_eq!(place(demand(4, 8, Placement::Spread), &[]), None);
    let cordoned = Candidate {
        standing: Standing::Resting,
        ..node("a", 10)
    };
    assert_eq!(place(demand(4, 8, Placement::Spread), &[cordoned]), None);
}

#[test]
fn shares_move_only_as_far_as_others_have_given_up() {
    let wanted = demand(10, 10, Placement::Spread);
    let mut nodes = vec![node("a", 100)];
    let first = place(wanted, &nodes).unwrap();
    assert_eq!(first[&NodeName::from("a")], hold(10, 10));
    settle(&mut nodes, &first);
    nodes.push(node("b", 100));
    let second = place(wanted, &nodes).unwrap();
    // The first node is told at once, the second when that is so.
    assert_eq!(second[&NodeName::from("a")], hold(5, 5));
    assert_eq!(second.get(&NodeName::from("b")), None);
    settle(&mut nodes, &second);
    let third = place(wanted, &nodes).unwrap();
    assert_eq!(third[&NodeName::from("b")], hold(5, 5));
}

#[test]
fn leased_branches_count_until_they_are_gone() {
    let wanted = demand(4, 10, Placement::Spread);
    let leased = Candidate {
        existing: 8,
        standing: Standing::Resting,
        in_force: Some(Share {
            replicas: 4,
            max_branches: 8,
        }),
        ..node("a", 100)
    };
    let orders = place(wanted, &[leased, node("b", 100)]).unwrap();
    assert_eq!(orders[&NodeName::from("a")], hold(0, 1));
    assert_eq!(orders[&NodeName::from("b")], hold(2, 2));
}

#[test]
fn a_silent_node_keeps_its_share_and_a_pressed_one_its_branches() {
    let share = Some(Share {
        replicas: 5,
        max_branches: 10,
    });
    let silent = Candidate {
        standing: Standing::Silent,
        in_force: share,
        existing: 5,
        held: 5,
        ..node("a", 100)
    };
    let pressed = Candidate {
        standing: Standing::Pressed,
        in_force: share,
        existing: 2,
        held: 2,
        ..node("b", 100)
    };
    let orders = place(
        demand(15, 30, Placement::Spread),
        &[silent, pressed, node("c", 100)],
    )
    .unwrap();
    assert_eq!(orders.get(&NodeName::from("a")), None);
    assert_eq!(orders[&NodeName::from("b")], hold(2, 2));
    // Of 30, 10 are the silent node's and 10 were allowed to the pressed one until it answers.
    assert_eq!(orders[&NodeName::from("c")], hold(8, 10));
}

#[test]
fn a_node_that_does_not_fit_gives_up_the_pool() {
    let known = Candidate {
        standing: Standing::Unfit,
        in_force: Some(Share::resting()),
        ..node("a", 100)
    };
    let unknown = Candidate {
        standing: Standing::Unfit,
        ..node("b", 100)
    };
    let orders = place(
        demand(4, 8, Placement::Spread),
        &[known, unknown, node("c", 100)],
    )
    .unwrap();
    assert_eq!(orders[&NodeName::from("a")], Order::Remove);
    assert_eq!(orders.get(&NodeName::from("b")), None);
}

#[test]
fn leases_go_where_most_is_ready_or_where_most_are_leased() {
    let stocks = |second| {
        [("a", 3, 1), ("b", second, 5), ("c", 0, 9)]
            .map(|(node, available, leased)| Stock {
                node: node.into(),
                available,
                leased,
            })
            .into_iter()
    };
    assert_eq!(choose(Placement::Spread, stocks(2)), Some("a".into()));
    assert_eq!(choose(Placement::Spread, stocks(3)), Some("a".into()));
    assert_eq!(choose(Placement::Spread, stocks(4)), Some("b".into()));
    assert_eq!(choose(Placement::Pack, stocks(1)), Some("b".into()));
    assert_eq!(choose(Placement::Pack, std::iter::empty()), None);
}

fn standing() -> impl Strategy<Value = Standing> {
    prop_oneof![
        4 => Just(Standing::Eligible),
        1 => Just(Standing::Pressed),
        1 => Just(Standing::Silent),
        1 => Just(Standing::Resting),
        1 => Just(Standing::Unfit),
    ]
}

fn fleets() -> impl Strategy<Value = Vec<Candidate>> {
    let one = (standing(), 0_u32..60);
    prop::collection::vec(one, 1..6).prop_map(|nodes| {
        nodes
            .into_iter()
            .enumerate()
            .map(|(index, (standing, room))| Candidate {
                standing,
                ..node(&format!("n{index}"), room)
            })
            .collect()
    })
}

proptest! {
    /// Whatever happens to the nodes, and to the numbers, at no time more is allowed than maxBranches,
    /// unless it was lowered below what exists; and when nothing changes any more, orders repeat.
    #[test]
    fn never_more_than_allowed_and_stable(
        fleet in fleets(),
        later in prop::collection::vec((standing(), 0_u32..4), 6),
        (max, replicas) in (1_u32..80).prop_flat_map(|max| (Just(max), 0..=max)),
        pack in any::<bool>(),
    ) {
        let placement = if pack { Placement::Pack } else { Placement::Spread };
        let wanted = demand(replicas, max, placement);
        let mut nodes = fleet;
        let allowed = |nodes: &[Candidate]| -> u32 { nodes.iter().map(Candidate::committed).sum() };
        let told = |nodes: &mut Vec<Candidate>| -> Result<(), TestCaseError> {
            let Some(orders) = place(wanted, nodes) else { return Ok(()) };
            // One after the other hears of it, so every prefix of the orders must hold.
            let names: Vec<NodeName> = orders.keys().cloned().collect();
            for name in names {
                let one = BTreeMap::from([(name.clone(), orders[&name])]);
                settle(nodes, &one);
                prop_assert!(allowed(nodes) <= max, "{} of {max}", allowed(nodes));
            }
            Ok(())
        };
        for (index, (standing, leased)) in later.into_iter().enumerate() {
            told(&mut nodes)?;
            let slot = index % nodes.len();
            let node = &mut nodes[slot];
            node.standing = standing;
            // Ready branches become leased ones.
            node.held -= node.held.min(leased);
        }
        for node in &mut nodes {
            if matches!(node.standing, Standing::Silent) {
                node.standing = Standing::Eligible;
            }
        }
        // Room that one gives up is what another can be told of next, so it may take as many rounds as branches.
        for _ in 0..100 {
            told(&mut nodes)?;
        }
        let last = place(wanted, &nodes);
        if let Some(orders) = &last {
            settle(&mut nodes, orders);
        }
        prop_assert_eq!(last, place(wanted, &nodes));
    }

    #[test]
    fn an_even_division_is_even(total in 0_u32..500, highs in prop::collection::vec(0_u32..100, 1..8)) {
        let bounds: Vec<_> = highs.iter().map(|high| (0, *high)).collect();
        let shares = level(total, &bounds);
        let possible: u32 = highs.iter().sum();
        prop_assert_eq!(shares.iter().sum::<u32>(), total.min(possible));
        let most = shares.iter().max().copied().unwrap_or(0);
        for (share, high) in shares.iter().zip(&highs) {
            prop_assert!(share <= high);
            prop_assert!(*share == *high || *share + 1 >= most);
        }
    }
}
