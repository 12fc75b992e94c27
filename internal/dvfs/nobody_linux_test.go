package dvfs_test

import "golang.org/x/sys/unix"

// readAsNobody makes the calling thread open files as a user without rights.
func readAsNobody() error { return unix.Setfsuid(65534) }
