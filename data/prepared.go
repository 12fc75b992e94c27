package data

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// preparedFormat is part of the name of prepared files. It changes whenever they would.
const preparedFormat = "1"

// prepared returns the folder of what write makes of a source. One process of the host makes it, others wait. key says all that the
// content of the folder follows from.
func prepared(key string, write func(folder string) error) (folder string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", &trainer.DataError{Reason: fmt.Sprintf("no folder for prepared data: %v; set XDG_CACHE_HOME", err)}
	}
	cache = filepath.Join(cache, "soliton", "data")
	sum := sha256.Sum256([]byte(preparedFormat + "\n" + key))
	folder = filepath.Join(cache, hex.EncodeToString(sum[:16]))
	if _, err := os.Stat(folder); err == nil {
		return folder, nil
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", failed(cache, err)
	}
	lock, err := os.OpenFile(folder+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", failed(folder, err)
	}
	defer lock.Close()
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return "", failed(folder+".lock", err)
	}
	if _, err := os.Stat(folder); err == nil {
		return folder, nil // another process has made it
	}
	unfinished := folder + ".new" // of a process that has ended, if it is there: only the holder of the lock writes it
	if err := os.RemoveAll(unfinished); err != nil {
		return "", failed(unfinished, err)
	}
	if err := os.Mkdir(unfinished, 0o700); err != nil {
		return "", failed(unfinished, err)
	}
	if err := write(unfinished); err != nil {
		_ = os.RemoveAll(unfinished)
		return "", err
	}
	if err := os.Rename(unfinished, folder); err != nil {
		return "", failed(folder, err)
	}
	return folder, nil
}

func failed(path string, err error) error {
	return &trainer.DataError{Path: path, Reason: "prepare data: " + find.Cause(err)}
}

// identity says which state of a file is meant: it changes when the file does.
func identity(f find.File) (string, error) {
	path, err := filepath.Abs(f.At())
	if err != nil {
		return "", failed(f.Path, err)
	}
	st, err := os.Stat(f.At())
	if err != nil {
		return "", failed(f.Path, err)
	}
	return fmt.Sprintf("%q %d %d\n", path, st.Size(), st.ModTime().UnixNano()), nil
}

// source describes prepared data.
type source struct {
	Bytes  int64  `json:"bytes"`  // of the source
	SHA256 string `json:"sha256"` // of its bytes

	Documents int64 `json:"documents,omitempty"` // that it holds, or samples of an index
}

const sourceFile = "source.json"

func (s source) write(folder string) error {
	b, err := json.Marshal(s)
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, sourceFile), b, 0o600)
	}
	if err != nil {
		return failed(folder, err)
	}
	return nil
}

func readSource(folder string) (s source, err error) {
	path := filepath.Join(folder, sourceFile)
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, &trainer.DataError{Path: path, Reason: fmt.Sprintf("%s; remove %s", find.Cause(err), folder)}
	}
	return s, nil
}

// existing returns a prepared file, which must have the given size.
func existing(folder, file string, size int64) (part, error) {
	path := filepath.Join(folder, file)
	st, err := os.Stat(path)
	if err != nil {
		return part{}, failed(path, err)
	}
	if st.Size() != size {
		return part{}, &trainer.DataError{Path: path, Reason: fmt.Sprintf("has %d bytes, not %d; remove %s", st.Size(), size, folder)}
	}
	return part{path: path, size: size}, nil
}

// compression returns the suffix of a compressed file's name, "" for others.
func compression(path string) string {
	switch ext := filepath.Ext(path); ext {
	case ".gz", ".zst":
		return ext
	}
	return ""
}

// maxWindow bounds the memory that a compressed file can ask for.
const maxWindow = 128 << 20

// openPlain opens a compressed file to be read once, unpacked.
func openPlain(path string) (r io.Reader, closeFile func(), err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, &trainer.DataError{Path: path, Reason: find.Cause(err)}
	}
	switch compression(path) {
	case ".gz":
		r, err = gzip.NewReader(f)
	case ".zst":
		var d *zstd.Decoder
		if d, err = zstd.NewReader(f, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1)); err == nil {
			return d, func() { d.Close(); f.Close() }, nil
		}
	}
	if err != nil {
		f.Close()
		return nil, nil, &trainer.DataError{Path: path, Reason: find.Cause(err)}
	}
	return r, func() { f.Close() }, nil
}

// unpacked returns the prepared file with the content of a compressed one.
func unpacked(f find.File) (part, error) {
	key, err := identity(f)
	if err != nil {
		return part{}, err
	}
	const file = "content"
	folder, err := prepared("unpack "+key, func(folder string) error {
		r, closeFile, err := openPlain(f.At())
		if err != nil {
			return err
		}
		defer closeFile()
		h := sha256.New()
		n, err := writeFile(filepath.Join(folder, file), func(w io.Writer) error {
			_, err := io.Copy(io.MultiWriter(w, h), r)
			return err
		})
		if err != nil {
			return &trainer.DataError{Path: f.Path, Reason: "unpack: " + find.Cause(err)}
		}
		return source{Bytes: n, SHA256: hex.EncodeToString(h.Sum(nil))}.write(folder)
	})
	if err != nil {
		return part{}, err
	}
	s, err := readSource(folder)
	if err != nil {
		return part{}, err
	}
	p, err := existing(folder, file, s.Bytes)
	p.name = f.Path
	return p, err
}

// writeFile makes a file and returns its size.
func writeFile(path string, write func(w io.Writer) error) (size int64, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := write(f); err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}
