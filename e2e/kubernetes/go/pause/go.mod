module branchpool.dev/e2e/kubernetes/pause

go 1.24.0
