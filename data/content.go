package data

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// content is what several files hold, one after the other. It is read by position.
type content struct {
	files []part
	ends  []int64 // of each file in the whole
	open  openFiles
	kept  blocks
}

// part is a file's share of a content.
type part struct {
	path string
	size int64  // bytes of the file
	skip int64  // bytes before its share, such as a header
	name string // of its source, where that is another file; else ""

	remote  io.ReaderAt // of an object, whose name is path
	version string      // of the object
}

func (p part) shown() string {
	if p.name != "" {
		return p.name
	}
	return p.path
}

func newContent(parts []part) *content {
	c := &content{files: parts, ends: make([]int64, len(parts))}
	var at int64
	for i, p := range parts {
		at += p.size - p.skip
		c.ends[i] = at
	}
	return c
}

// contentOf is the content of the files that match patterns. Those that are compressed are unpacked into prepared files.
func contentOf(patterns []string) (*content, error) {
	files, err := filesOf(patterns)
	if err != nil {
		return nil, err
	}
	parts := make([]part, len(files))
	for i, f := range files {
		if parts[i] = (part{path: f.At(), size: f.Size}); f.Copy != "" {
			parts[i].name = f.Path
		}
		if compression(f.Path) == "" {
			continue
		}
		if parts[i], err = unpacked(f); err != nil {
			return nil, err
		}
	}
	return newContent(parts), nil
}

func (c *content) size() int64 {
	if len(c.ends) == 0 {
		return 0
	}
	return c.ends[len(c.ends)-1]
}

// read fills p with the bytes from position at on. Its errors name the file.
func (c *content) read(p []byte, at int64) error {
	i, _ := slices.BinarySearch(c.ends, at+1)
	for len(p) > 0 {
		if i == len(c.files) {
			return io.ErrUnexpectedEOF
		}
		f, began := c.files[i], int64(0)
		if i > 0 {
			began = c.ends[i-1]
		}
		n := min(int64(len(p)), c.ends[i]-at)
		if n > 0 {
			read := c.open.read
			if f.remote != nil {
				read = c.kept.read
			}
			if err := read(i, f, p[:n], f.skip+at-began); err != nil {
				return err
			}
		}
		p, at, i = p[n:], at+n, i+1
	}
	return nil
}

// openFiles keeps the files open that were read last.
type openFiles struct {
	kept  map[int]*os.File
	order []int // of opening
}

const maxOpen = 64

func (o *openFiles) read(i int, of part, p []byte, at int64) error {
	f, err := o.get(i, of)
	if err != nil {
		return err
	}
	if _, err = f.ReadAt(p, at); err != nil {
		o.drop(i) // another attempt opens it again
		return &trainer.DataError{Path: of.shown(), Reason: fmt.Sprintf("byte %d: %s", at, find.Cause(err))}
	}
	return nil
}

func (o *openFiles) get(i int, of part) (*os.File, error) {
	if f := o.kept[i]; f != nil {
		return f, nil
	}
	f, err := os.Open(of.path)
	if err != nil {
		return nil, &trainer.DataError{Path: of.shown(), Reason: find.Cause(err)}
	}
	if st, err := f.Stat(); err == nil && st.Size() != of.size {
		f.Close()
		return nil, &trainer.DataError{Path: of.shown(), Reason: fmt.Sprintf("has changed: it had %d bytes and has %d now", of.size, st.Size())}
	}
	if len(o.order) == maxOpen {
		o.drop(o.order[0])
	}
	if o.kept == nil {
		o.kept = map[int]*os.File{}
	}
	o.kept[i], o.order = f, append(o.order, i)
	return f, nil
}

func (o *openFiles) drop(i int) {
	if f := o.kept[i]; f != nil {
		f.Close()
		delete(o.kept, i)
		o.order = slices.DeleteFunc(o.order, func(k int) bool { return k == i })
	}
}

// Bounds of what is hashed of files; see the package comment.
const (
	wholeBytes  = 64 << 20
	wholeFiles  = 1024 // more of them are one line of the manifest
	pieces      = 1024
	pieceLength = 16 << 10
	pieceFiles  = 8 // of mean size, in a piece
)

const manifestFile = "manifest.json"

// manifest returns the fingerprint of the files. One process of a host makes it, and the others read it: it is kept for the
// state that the files are in. Where there is no folder for that, every process makes it.
func (c *content) manifest() ([]trainer.DataFile, error) {
	if c.files[0].remote != nil {
		return c.versions(), nil
	}
	key, ok := c.state()
	if !ok {
		return c.fingerprint()
	}
	var files []trainer.DataFile
	folder, err := prepared(key, func(folder string) (err error) {
		if files, err = c.fingerprint(); err != nil {
			return err
		}
		text, err := json.Marshal(files)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(folder, manifestFile), text, 0o600)
	})
	if files != nil {
		return files, nil
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(filepath.Join(folder, manifestFile))
	}
	if err != nil || json.Unmarshal(text, &files) != nil || len(files) == 0 {
		return c.fingerprint()
	}
	return files, nil
}

// settled is how long files must have stayed as they are for their times to tell of a change: file systems count in steps of up to
// seconds.
var settled = 2 * time.Second

// state says which files these are, and in which state, as the file system has it: a file that was written has another time of
// change, which no program can set. There is no state of many files, since asking for each takes as long as hashing, and none of files that
// were written just now.
func (c *content) state() (key string, ok bool) {
	if len(c.files) > wholeFiles {
		return "", false
	}
	var b strings.Builder
	b.WriteString("fingerprint\n")
	now := time.Now()
	for _, f := range c.files {
		path, err := filepath.Abs(f.path)
		if err != nil {
			return "", false
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || st.Size != f.size {
			return "", false
		}
		if changed := time.Unix(st.Ctim.Unix()); now.Sub(changed) < settled {
			return "", false
		}
		fmt.Fprintf(&b, "%q %q %d %d %d %d %d %d\n", path, f.name, f.skip, st.Size, st.Dev, st.Ino, st.Mtim.Nano(), st.Ctim.Nano())
	}
	return b.String(), true
}

// versions is the fingerprint of objects, of which the server says in which state they are.
func (c *content) versions() (files []trainer.DataFile) {
	all := sha256.New()
	for _, f := range c.files {
		sum := sha256.Sum256([]byte(f.version))
		fmt.Fprintf(all, "%d %x\n", f.size, sum)
		if len(c.files) <= wholeFiles {
			files = append(files, trainer.DataFile{Path: f.path, Size: f.size, SHA256: hex.EncodeToString(sum[:])})
		}
	}
	if files == nil {
		name := fmt.Sprintf("%s to %s, %d objects", c.files[0].path, c.files[len(c.files)-1].path, len(c.files))
		files = append(files, trainer.DataFile{Path: name, Size: c.size(), SHA256: hex.EncodeToString(all.Sum(nil))})
	}
	return files
}

// fingerprint lists the files with their hashes if both are few, else gives one line for all of them.
func (c *content) fingerprint() ([]trainer.DataFile, error) {
	if len(c.files) <= wholeFiles && c.size() <= wholeBytes {
		var files []trainer.DataFile
		buf := make([]byte, 1<<20)
		var at int64
		for i, f := range c.files {
			h := sha256.New()
			for at < c.ends[i] {
				p := buf[:min(int64(len(buf)), c.ends[i]-at)]
				if err := c.read(p, at); err != nil {
					return nil, err
				}
				h.Write(p)
				at += int64(len(p))
			}
			files = append(files, trainer.DataFile{Path: f.shown(), Size: f.size - f.skip, SHA256: hex.EncodeToString(h.Sum(nil))})
		}
		return files, nil
	}
	h := sha256.New()
	sizes := make([]byte, 0, 8*len(c.ends))
	for _, end := range c.ends {
		sizes = binary.LittleEndian.AppendUint64(sizes, uint64(end))
	}
	h.Write(sizes)
	// Opening files takes the time, so a piece is not longer than some of them.
	buf := make([]byte, min(pieceLength, c.size(), c.size()/int64(len(c.files))*pieceFiles+1))
	last := c.size() - int64(len(buf))
	for i := range int64(pieces) {
		if err := c.read(buf, last/(pieces-1)*i+last%(pieces-1)*i/(pieces-1)); err != nil {
			return nil, err
		}
		h.Write(buf)
	}
	name := c.files[0].shown()
	if n := len(c.files); n > 1 {
		name = fmt.Sprintf("%s to %s, %d files", name, c.files[n-1].shown(), n)
	}
	return []trainer.DataFile{{Path: name, Size: c.size(), SHA256: hex.EncodeToString(h.Sum(nil))}}, nil
}
