# Reads the output of `cargo test`; prints a line for each test binary and the output of those that
# failed; writes "PASSED FAILED SKIPPED" to the file named by `totals`.

function binary_done(    i, first) {
    if (name == "") return
    if (!has_result) {
        # Killed, aborted or timed out: no summary came.
        failed++
        printf "  FAILED  %s: ended without a result\n", name
        first = lines > 60 ? lines - 60 : 0
        for (i = first; i < lines; i++) print "    " output[i]
    }
    name = ""
    lines = 0
}

function binary_begins(new_name) {
    binary_done()
    name = new_name
    has_result = 0
    failures = 0
}

# "Running unittests src/lib.rs (target/debug/deps/branchpool_crds-0123456789abcdef)"
/^ +Running .*\(.*\)$/ {
    file = $0
    sub(/.*\(/, "", file); sub(/\)$/, "", file); sub(/.*\//, "", file); sub(/-[0-9a-f]+$/, "", file)
    binary_begins(file ($2 == "unittests" ? " (unit tests, " $3 ")" : ""))
    next
}

/^ +Doc-tests / { binary_begins($2 " (documentation)"); next }

name == "" { next }

/^test result: / {
    has_result = 1
    split($0, part, /[:;.] */)
    p = f = s = 0
    for (i in part) {
        if (part[i] ~ /^[0-9]+ passed$/) p = part[i] + 0
        if (part[i] ~ /^[0-9]+ failed$/) f = part[i] + 0
        if (part[i] ~ /^[0-9]+ ignored$/) s = part[i] + 0
    }
    passed += p; failed += f; skipped += s
    took = $0
    sub(/.*finished in /, "", took)
    if (p + f + s > 0) {
        printf "  %-6s  %3d passed, %d failed, %d skipped  %8s  %s\n", f ? "FAILED" : "ok", p, f, s, took, name
        if (f) for (i = failures; i < lines && i < failures + 400; i++) print "    " output[i]
        fflush()
    }
    next
}

/^failures:$/ && !failures { failures = lines }
{ output[lines++] = $0 }

END {
    binary_done()
    printf "%d %d %d\n", passed, failed, skipped > totals
}
