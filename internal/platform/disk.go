package platform

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// IsFull reports whether an error says that the disk has no room, or the user no quota.
func IsFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// passing are errors of a write that come from the state of the machine, which its users can change: no descriptor or memory is left, the
// file, the folder or the disk takes no writes, or the process has a limit for the size of files.
var passing = []error{unix.EROFS, unix.EPERM, unix.EACCES, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EFBIG}

// MayPass reports whether what could not be written can be written later, because the error [IsFull] or is of the state of the machine.
func MayPass(err error) bool {
	return IsFull(err) || slices.ContainsFunc(passing, func(e error) bool { return errors.Is(err, e) })
}

// FreeSpace returns how many bytes may be written to the file system of a path, or false where that is unknown.
func FreeSpace(path string) (bytes int64, ok bool) {
	var s unix.Statfs_t
	if unix.Statfs(path, &s) != nil {
		return 0, false
	}
	return int64(s.Bavail * uint64(s.Bsize)), true
}
