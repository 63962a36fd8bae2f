//! The fuzzer's corpus and mutations of it, a bounded number, the same in each run.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

#[path = "../fuzz/exercise.rs"]
mod exercise;

use std::{fs, path::Path};

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

const MUTATIONS: usize = 300_000;
/// What parsers look for.
const TOKENS: [&[u8]; 16] = [
    b"\0",
    b",",
    b"=",
    b"-c ",
    b"--",
    b"\\",
    b"user\0",
    b"options\0",
    b"_pq_.",
    b"n,,",
    b"y,,",
    b"p=tls-server-end-point,,",
    b"r=abcnonce",
    b"c=biws",
    b",p=",
    b"\xff\xff\xff\xff",
];

fn corpus() -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/login");
    let mut paths: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| fs::read(path).unwrap())
        .collect()
}

fn mutate(random: &mut StdRng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut made = input.to_vec();
    for _ in 0..random.random_range(1..=4) {
        let position = random.random_range(0..=made.len());
        let end = random.random_range(position..=made.len().min(position + 16));
        match random.random_range(0..5) {
            0 => made.truncate(position),
            1 => drop(made.drain(position..end)),
            2 => random.fill_bytes(&mut made[position..end]),
            3 => {
                let token = TOKENS[random.random_range(0..TOKENS.len())];
                made.splice(position..end, token.iter().copied());
            }
            _ => {
                let from = random.random_range(0..=other.len());
                made.splice(position.., other[from..].iter().copied());
            }
        }
    }
    made
}

#[test]
fn the_corpus_and_its_mutations() {
    let corpus = corpus();
    assert!(corpus.len() > 10);
    for input in &corpus {
        exercise::login(input);
    }
    let mut random = StdRng::seed_from_u64(4);
    for _ in 0..MUTATIONS {
        let input = &corpus[random.random_range(0..corpus.len())];
        let other = &corpus[random.random_range(0..corpus.len())];
        exercise::login(&mutate(&mut random, input, other));
    }
}
