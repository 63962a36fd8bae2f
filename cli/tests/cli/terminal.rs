//! On a terminal: the progress line, and the keys that signal the whole foreground group.

use branchpool_agent_api::LeasePhase;
use rustix::process::Signal;

use super::{Agent, code, finish, pty::Terminal, send};

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_warms_shows_progress() {
    let agent = Agent::start().await;
    agent.shop(0).await;
    let (mut terminal, child) = Terminal::run(&agent.command(&["lease", "shop", "--wait", "10m"]));
    terminal.until("default/shop: 0 of 0 ready");
    agent.shop(1).await;
    terminal.until("default/shop: 1 of 1 ready");
    terminal.until("\r\u{1b}[Kpostgresql:///app");
    assert_eq!(code(&finish(child).await), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_reaches_the_command_once() {
    let agent = Agent::with_shop().await;
    let script = "trap 'echo interrupted' INT; trap 'echo terminated; exit 9' TERM; \
        echo started; until read line; do :; done";
    let arguments = ["lease", "shop", "--id", "l1", "--", "sh", "-c", script];
    let (mut terminal, child) = Terminal::run(&agent.command(&arguments));
    terminal.until("started");
    // Held until the command has had its signal from the terminal: two at once would count as one.
    send(Signal::STOP, &child);
    terminal.press("\u{3}");
    terminal.until("interrupted");
    // Passed on after whatever is made of the first.
    send(Signal::TERM, &child);
    send(Signal::CONT, &child);
    terminal.until("terminated");
    assert_eq!(code(&finish(child).await), 9);
    let interruptions = terminal.seen.matches("interrupted").count();
    assert_eq!(interruptions, 1, "{:?}", terminal.seen);
    assert_eq!(agent.phase("l1"), Some(LeasePhase::Released));
}
