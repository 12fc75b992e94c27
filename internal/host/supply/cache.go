package supply

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// cache is a folder of files by their SHA-256, FOLDER/SHA256/NAME, which all runs of a user on a machine share. A file use-* lists what
// one process uses, which keeps a lock on it. What none uses is removed when room is needed, the longest unused first.
type cache struct {
	folder string
	limit  int64

	mu   sync.Mutex
	uses *os.File        // nil before the first file
	used map[string]bool // what it lists
}

const maxCache = 256 << 30 // bytes

func newCache(folder string, limit int64) *cache {
	return &cache{folder: folder, limit: cmp.Or(limit, maxCache), used: make(map[string]bool)}
}

// close lets others remove what this process has used.
func (c *cache) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.uses != nil {
		_ = os.Remove(c.uses.Name()) // without a lock it counts for nothing
		_ = c.uses.Close()
	}
}

// reserve says that files are used from now on, and makes room for those that are not here.
func (c *cache) reserve(ctx context.Context, files []control.DataFile) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.folder == "" {
		all, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("no folder for data of other machines: %w; set XDG_CACHE_HOME", err)
		}
		c.folder = filepath.Join(all, "soliton", "files")
	}
	if err := os.MkdirAll(c.folder, 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(c.folder, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := hold(ctx, lock); err != nil {
		return err
	}
	if c.uses == nil {
		f, err := os.CreateTemp(c.folder, "use-")
		if err != nil {
			return err
		}
		if err := flock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
			return errors.Join(err, f.Close())
		}
		c.uses = f
	}
	need, now := int64(0), time.Now()
	var list strings.Builder
	counted := make(map[string]bool)
	for _, f := range files {
		if !counted[f.SHA256] && os.Chtimes(filepath.Join(c.folder, f.SHA256), now, now) != nil { // it is not there
			need += f.Size
		}
		counted[f.SHA256] = true
		if !c.used[f.SHA256] {
			c.used[f.SHA256] = true
			list.WriteString(f.SHA256 + "\n")
		}
	}
	if _, err := c.uses.WriteString(list.String()); err != nil {
		return err
	}
	return c.makeRoom(need)
}

// makeRoom removes files that no process uses; the folder is locked.
func (c *cache) makeRoom(need int64) error {
	entries, err := os.ReadDir(c.folder)
	if err != nil {
		return err
	}
	type entry struct {
		name string
		size int64
		last time.Time
	}
	var all []entry
	used := make(map[string]bool)
	var total int64
	for _, e := range entries {
		path := filepath.Join(c.folder, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), "use-"):
			if err := readUses(path, used); err != nil {
				return err
			}
		case e.IsDir() && isSum(e.Name()):
			x := entry{name: e.Name()}
			if info, err := e.Info(); err == nil {
				x.last = info.ModTime()
			}
			files, _ := os.ReadDir(path) // it may go just now
			for _, f := range files {
				if info, err := f.Info(); err == nil {
					x.size = max(x.size, info.Size()) // others are links to it
				}
			}
			total += x.size
			all = append(all, x)
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return a.last.Compare(b.last) })
	for _, e := range all {
		if total+need <= c.limit {
			return nil
		}
		if !used[e.name] {
			if err := os.RemoveAll(filepath.Join(c.folder, e.name)); err != nil {
				return err
			}
			total -= e.size
		}
	}
	if total+need > c.limit {
		return fmt.Errorf("%s has room for %.1f GB of data of other machines: %.1f GB are in use and %.1f GB are to come; copy the data to this machine",
			c.folder, float64(c.limit)/1e9, float64(total)/1e9, float64(need)/1e9)
	}
	return nil
}

// readUses adds what a process uses, and removes its list if it has ended.
func readUses(path string, used map[string]bool) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it has ended just now
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if flock(f, unix.LOCK_EX|unix.LOCK_NB) == nil {
		return os.Remove(path)
	}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		used[lines.Text()] = true
	}
	return lines.Err()
}

// keep returns the path of a file that was reserved. fetch writes it if it is not there.
func (c *cache) keep(ctx context.Context, f control.DataFile, fetch func(to *rundir.File) error) (string, error) {
	folder := filepath.Join(c.folder, f.SHA256)
	path := filepath.Join(folder, filepath.Base(f.Path))
	if there, _ := filepath.Glob(filepath.Join(folder, "[^.]*")); len(there) > 0 { // the name has no special characters
		for _, other := range there {
			if sum, err := sumOf(ctx, other, f.Size); err != nil || sum != f.SHA256 {
				continue
			}
			if other != path {
				_ = os.Remove(path)
				if err := os.Link(other, path); err != nil {
					return "", err
				}
			}
			return path, nil
		}
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", err
	}
	to, err := rundir.NewFile(path)
	if err != nil {
		return "", err
	}
	err = fetch(to)
	if err == nil {
		var sum string
		if sum, err = sumOf(ctx, to.Name(), f.Size); err == nil && sum != f.SHA256 {
			err = errors.New("what came has another SHA-256")
		}
	}
	if err != nil {
		to.Discard()
		_ = os.Remove(folder) // unless it has other files
		return "", err
	}
	return path, to.Commit()
}

// sumOf returns the SHA-256 of a file, which must have this size.
func sumOf(ctx context.Context, path string, size int64) (string, error) {
	f, err := rundir.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, io.LimitReader(rundir.WithContext(ctx, f), size+1))
	if err == nil && n != size {
		err = errors.New("it has another size now")
	}
	return hex.EncodeToString(h.Sum(nil)), err
}

func isSum(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == sha256.Size && s == strings.ToLower(s)
}

// hold waits for the lock of the folder, which others keep for moments.
func hold(ctx context.Context, f *os.File) error {
	for {
		err := flock(f, unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			if err != nil {
				return fmt.Errorf("%s: %w", f.Name(), err)
			}
			return nil
		}
	}
}
