package raftlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/timing"
)

// bbolt maps its file into memory and trusts it. A page that is cut off or is not what another page says of it ends the process,
// in a goroutine of bbolt where nothing can recover; and where the newest commit is broken, bbolt takes the one before it, which
// may lack a vote. So the structure of the file is checked before bbolt uses it. It has the format of go.etcd.io/bbolt, version 2:
// pages of 4 KiB or so, in the order of bytes of the machine, that form one B+ tree for each bucket.

const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2
	branchPage  = 1
	leafPage    = 2
	bucketEntry = 1 // the value is a bucket
	headerBytes = 16
	entryBytes  = 16
	notSynced   = 1<<64 - 1 // instead of the page of the free list
)

// checkFile reports what is wrong with the file of a log.
func checkFile(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &agree.NoLogError{Dir: filepath.Dir(path)}
	case err != nil:
		return fmt.Errorf("agree: %w", err)
	case !info.Mode().IsRegular() || info.Size() == 0:
		return &agree.DamagedError{File: path, Err: errors.New("it is empty, or no file")}
	}
	// No other process writes while bbolt holds the lock for reading. It reads the first pages only.
	db, err := bbolt.Open(path, 0, &bbolt.Options{ReadOnly: true, Timeout: timing.Lock})
	var denied *fs.PathError
	switch {
	case errors.Is(err, bbolterrors.ErrTimeout):
		return fmt.Errorf("%w: %s", agree.ErrInUse, filepath.Dir(path))
	case errors.As(err, &denied):
		return fmt.Errorf("agree: %w", err)
	case err != nil:
		return &agree.DamagedError{File: path, Err: err}
	}
	err = checkPages(path)
	if err != nil {
		err = &agree.DamagedError{File: path, Err: err}
	}
	return errors.Join(err, db.Close())
}

// meta is what a commit writes last, in page 0 or 1 in turn.
type meta struct {
	Magic, Version, PageSize, Flags uint32
	Root, Sequence                  uint64
	FreeList                        uint64
	End                             uint64 // pages from here on are not in use
	Commit                          uint64
	Checksum                        uint64
}

func readMeta(f io.ReaderAt, page int64) (m meta, err error) {
	b := make([]byte, binary.Size(m))
	if _, err := f.ReadAt(b, page+headerBytes); err != nil {
		return m, err
	}
	if _, err := binary.Decode(b, binary.NativeEndian, &m); err != nil {
		return m, err
	}
	sum := fnv.New64a()
	_, _ = sum.Write(b[:len(b)-8])
	if m.Magic != boltMagic || m.Version != boltVersion || m.Checksum != sum.Sum64() {
		return m, errors.New("the record of a commit is broken")
	}
	return m, nil
}

// pages is a walk through the tree of a file.
type pages struct {
	file io.ReaderAt
	meta
	seen map[uint64]bool
}

// An entry of a page. A page below begins with the key.
type entry struct {
	below      uint64 // the page, in a branch
	bucket     bool
	key, value []byte
}

func checkPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	newest, err := readMeta(f, 0)
	if err != nil {
		return err
	}
	other, err := readMeta(f, int64(newest.PageSize))
	if err != nil {
		return err
	}
	if other.Commit > newest.Commit {
		newest = other
	}
	size := uint64(newest.PageSize)
	switch {
	case newest.PageSize != other.PageSize || size < 1<<10 || size > 1<<20:
		return fmt.Errorf("it has pages of %d and %d bytes", newest.PageSize, other.PageSize)
	case newest.End > uint64(info.Size())/size:
		return fmt.Errorf("it is cut off: %d bytes of %d pages are left", info.Size(), newest.End)
	case newest.FreeList != notSynced:
		return errors.New("it was never begun")
	}
	p := &pages{file: f, meta: newest, seen: make(map[uint64]bool)}
	found := make(map[string]bool)
	err = p.walk(p.Root, nil, nil, func(e entry) error {
		if !e.bucket {
			return fmt.Errorf("unknown %.20q", e.key)
		}
		name := string(e.key)
		found[name] = true
		return p.bucket(e.value, func(e entry) error {
			if e.bucket || name == "logs" && len(e.key) != 8 {
				return fmt.Errorf("unknown %.20q in %.20q", e.key, name)
			}
			return nil
		})
	})
	if err == nil && (len(found) != 2 || !found["logs"] || !found["conf"]) {
		err = errors.New("it lacks the log")
	}
	return err
}

// bucket walks through a bucket, which lies in pages of its own or in its value.
func (p *pages) bucket(value []byte, visit func(entry) error) error {
	if len(value) < headerBytes {
		return errors.New("a bucket is cut short")
	}
	if root := binary.NativeEndian.Uint64(value); root != 0 {
		return p.walk(root, nil, nil, visit)
	}
	page := value[headerBytes:]
	if len(page) < headerBytes || binary.NativeEndian.Uint16(page[8:]) != leafPage {
		return errors.New("a bucket is no page")
	}
	return entries(page, nil, nil, visit)
}

// walk visits all entries of the leaves below a page. Their keys are at least low, and less than high unless that is nil.
func (p *pages) walk(id uint64, low, high []byte, visit func(entry) error) error {
	var head [headerBytes]byte
	if id < 2 || id >= p.End {
		return fmt.Errorf("page %d of %d", id, p.End)
	}
	if _, err := p.file.ReadAt(head[:], int64(id*uint64(p.PageSize))); err != nil {
		return err
	}
	kind, more := binary.NativeEndian.Uint16(head[8:]), uint64(binary.NativeEndian.Uint32(head[12:]))
	if binary.NativeEndian.Uint64(head[:]) != id || kind != leafPage && kind != branchPage || more >= p.End-id {
		return fmt.Errorf("page %d of %d is broken", id, p.End)
	}
	for i := id; i <= id+more; i++ {
		if p.seen[i] {
			return fmt.Errorf("page %d of %d is in use twice", i, p.End)
		}
		p.seen[i] = true
	}
	page := make([]byte, (1+more)*uint64(p.PageSize))
	if _, err := p.file.ReadAt(page, int64(id*uint64(p.PageSize))); err != nil {
		return err
	}
	if kind == leafPage {
		return wrap(id, entries(page, low, high, visit))
	}
	var below []entry
	if err := entries(page, low, high, func(e entry) error { below = append(below, e); return nil }); err != nil {
		return wrap(id, err)
	}
	if len(below) == 0 {
		return fmt.Errorf("page %d of %d is empty", id, p.End)
	}
	for i, e := range below {
		end := high
		if i+1 < len(below) {
			end = below[i+1].key
		}
		if err := p.walk(e.below, e.key, end, visit); err != nil {
			return err
		}
	}
	return nil
}

func wrap(page uint64, err error) error {
	if err != nil {
		err = fmt.Errorf("page %d: %w", page, err)
	}
	return err
}

// entries visits the entries of a page.
func entries(page, low, high []byte, visit func(entry) error) error {
	leaf := binary.NativeEndian.Uint16(page[8:]) == leafPage
	for i := range int(binary.NativeEndian.Uint16(page[10:])) {
		at := headerBytes + i*entryBytes
		if at+entryBytes > len(page) {
			return fmt.Errorf("entry %d is cut off", i)
		}
		word := func(n int) uint64 { return uint64(binary.NativeEndian.Uint32(page[at+4*n:])) }
		var e entry
		begin, key, value := word(0), word(1), uint64(0)
		if leaf {
			e.bucket = word(0)&bucketEntry != 0
			begin, key, value = word(1), word(2), word(3)
		} else {
			e.below = binary.NativeEndian.Uint64(page[at+8:])
		}
		if begin += uint64(at); begin+key+value > uint64(len(page)) {
			return fmt.Errorf("entry %d is cut off", i)
		}
		e.key, e.value = page[begin:begin+key], page[begin+key:begin+key+value]
		order := bytes.Compare(e.key, low)
		if order < 0 || order == 0 && i > 0 || high != nil && bytes.Compare(e.key, high) >= 0 {
			return fmt.Errorf("entry %d is out of order", i)
		}
		low = e.key
		if err := visit(e); err != nil {
			return err
		}
	}
	return nil
}
