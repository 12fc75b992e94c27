package platform

import "golang.org/x/sys/unix"

// FreeSpace returns how many bytes may be written to the file system of a path, or false where that is unknown.
func FreeSpace(path string) (bytes int64, ok bool) {
	var s unix.Statfs_t
	if unix.Statfs(path, &s) != nil {
		return 0, false
	}
	return int64(s.Bavail * uint64(s.Bsize)), true
}
