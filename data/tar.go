package data

import (
	"archive/tar"
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Shards are samples in tar files, as WebDataset has them: files side by side in an archive whose names are the same up to the first dot
// behind the last slash are one sample, and what follows the dot names its fields. See [Tar].
type Shards struct {
	stored          *content
	fields, samples *content
	names           []string // of fields
	n               int
	sum             string // of the index
	key             string // that says which samples these are
}

// Files of an index of archives.
const (
	fieldsFile = "fields" // in the order of the archives; see fieldSize
	namesFile  = "names.json"
	fieldSize  = 20 // where it begins in all archives and its size, uint64, and the number of its name, uint32
)

// Bounds of an archive.
const (
	maxFields = 256 // names of fields, and fields of a sample
	maxName   = 4096
	maxSample = 1 << 30 // bytes
)

// Tar returns the samples in tar files, in path order, those of each in its order, plain or compressed. The headers are read once for
// each host, by the process that comes first, into an index; a sample is read from its place when it is asked for. Errors are of type
// [*trainer.DataError].
func Tar(patterns ...string) (*Shards, error) {
	c, err := contentOf(patterns)
	if err != nil {
		return nil, err
	}
	key := "tar\n"
	for _, f := range c.files {
		id, err := identity(find.File{Path: f.path, Size: f.size})
		if err != nil {
			return nil, err
		}
		key += id
	}
	folder, err := prepared(key, func(folder string) error { return indexTar(c, folder) })
	if err != nil {
		return nil, err
	}
	made, err := readSource(folder)
	if err != nil {
		return nil, err
	}
	fields, err := existing(folder, fieldsFile, made.Bytes)
	if err != nil {
		return nil, err
	}
	samples, err := existing(folder, samplesFile, 8*made.Documents)
	if err != nil {
		return nil, err
	}
	s := &Shards{stored: c, fields: newContent([]part{fields}), samples: newContent([]part{samples}), n: int(made.Documents), sum: made.SHA256, key: key}
	text, err := os.ReadFile(filepath.Join(folder, namesFile))
	if err == nil {
		err = json.Unmarshal(text, &s.names)
	}
	if err != nil {
		return nil, failed(folder, err)
	}
	if s.n == 0 {
		return nil, &trainer.DataError{Path: c.files[0].shown(), Reason: fmt.Sprintf("has no samples (%d archives)", len(c.files))}
	}
	return s, nil
}

// indexTar writes the index of archives.
func indexTar(c *content, folder string) error {
	h := sha256.New()
	x := tarIndex{numbers: make(map[string]uint32)}
	size, err := writeFile(filepath.Join(folder, fieldsFile), func(w io.Writer) error {
		_, err := writeFile(filepath.Join(folder, samplesFile), func(e io.Writer) error {
			x.fields, x.samples = bufio.NewWriter(io.MultiWriter(w, h)), bufio.NewWriter(e)
			var began int64
			for i, f := range c.files {
				if err := x.archive(f, began); err != nil {
					return err
				}
				began = c.ends[i]
			}
			if err := x.fields.Flush(); err != nil {
				return err
			}
			return x.samples.Flush()
		})
		return err
	})
	if err != nil {
		return asDataError(folder, err)
	}
	names, err := json.Marshal(x.names)
	if err == nil {
		_, err = h.Write(names)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, namesFile), names, 0o600)
	}
	if err != nil {
		return failed(folder, err)
	}
	return source{Bytes: size, SHA256: hex.EncodeToString(h.Sum(nil)), Documents: x.made}.write(folder)
}

// tarIndex is the index under way.
type tarIndex struct {
	fields, samples *bufio.Writer
	names           []string
	numbers         map[string]uint32 // of names

	sample map[string]bool // the names of fields of the sample under way, nil before the first
	key    string          // of it
	size   int64           // of its fields
	count  uint64          // of fields
	made   int64           // of samples
}

// at is a file whose position counts.
type at struct {
	*os.File
	pos int64
}

func (a *at) Read(p []byte) (n int, err error) {
	n, err = a.File.Read(p)
	a.pos += int64(n)
	return n, err
}

func (a *at) Seek(offset int64, whence int) (pos int64, err error) {
	if pos, err = a.File.Seek(offset, whence); err == nil {
		a.pos = pos
	}
	return pos, err
}

// archive adds the samples of an archive, which begins at a position in the content of all.
func (x *tarIndex) archive(f part, began int64) error {
	fail := func(format string, args ...any) error {
		return &trainer.DataError{Path: f.shown(), Reason: fmt.Sprintf(format, args...)}
	}
	file, err := os.Open(f.path)
	if err != nil {
		return fail("%s", find.Cause(err))
	}
	defer file.Close()
	place := &at{File: file}
	archive := tar.NewReader(place)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return x.endSample()
		}
		if err != nil {
			return fail("byte %d: %v", place.pos, err)
		}
		if header.Typeflag != tar.TypeReg {
			continue // folders, links
		}
		sparse := slices.ContainsFunc([]string{"GNU.sparse.major", "GNU.sparse.size", "GNU.sparse.map", "GNU.sparse.realsize"}, func(name string) bool {
			_, ok := header.PAXRecords[name]
			return ok
		})
		switch {
		case sparse:
			return fail("byte %d: %.200q is a sparse file, which is not supported", place.pos, header.Name)
		case header.Size > maxDocument:
			return fail("byte %d: %.200q has %d bytes; %d are supported", place.pos, header.Name, header.Size, maxDocument)
		case place.pos > f.size-header.Size:
			return fail("byte %d: %.200q has %d bytes, and the archive ends before", place.pos, header.Name, header.Size)
		case len(header.Name) > maxName:
			return fail("byte %d: a name has %d bytes", place.pos, len(header.Name))
		}
		folder, base := path.Split(header.Name)
		key, field, ok := strings.Cut(base, ".")
		if !ok || key == "" || field == "" {
			continue // what is hidden, and what has no field
		}
		if key = folder + key; x.sample == nil || key != x.key {
			if err := x.endSample(); err != nil {
				return err
			}
			x.key, x.sample, x.size = key, make(map[string]bool), 0
		}
		if x.size += header.Size; x.size > maxSample {
			return fail("byte %d: the sample %.200q has more than %d bytes", place.pos, key, maxSample)
		}
		if x.sample[field] {
			return fail("byte %d: the sample %.200q has the field %.200q twice", place.pos, key, field)
		}
		number, ok := x.numbers[field]
		if !ok {
			if number = uint32(len(x.names)); number == maxFields {
				return fail("byte %d: %.200q is the name of one more field than %d", place.pos, field, maxFields)
			}
			x.names, x.numbers[field] = append(x.names, field), number
		}
		x.sample[field] = true
		x.count++
		b := binary.LittleEndian.AppendUint64(nil, uint64(began+place.pos))
		b = binary.LittleEndian.AppendUint64(b, uint64(header.Size))
		if _, err := x.fields.Write(binary.LittleEndian.AppendUint32(b, number)); err != nil {
			return err
		}
	}
}

// endSample ends the sample under way. None goes on in another archive.
func (x *tarIndex) endSample() error {
	if x.sample == nil {
		return nil
	}
	x.sample = nil
	x.made++
	_, err := x.samples.Write(binary.LittleEndian.AppendUint64(nil, x.count))
	return err
}

// Samples returns the number of samples.
func (s *Shards) Samples() int { return s.n }

// Fields returns the names of all fields, in the order in which they come first.
func (s *Shards) Fields() []string { return slices.Clone(s.names) }

// Read returns the fields of a sample by name. It is for one goroutine at a time.
func (s *Shards) Read(i int) (map[string][]byte, error) {
	if i < 0 || i >= s.n {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("there is no sample %d of %d", i, s.n)}
	}
	damaged := &trainer.DataError{Path: s.fields.files[0].path, Reason: "is damaged; remove its folder"}
	var ends [16]byte
	b := ends[:]
	if i == 0 {
		b = ends[8:]
	}
	if err := s.samples.read(b, max(int64(i)-1, 0)*8); err != nil {
		return nil, err
	}
	lo, hi := binary.LittleEndian.Uint64(ends[:]), binary.LittleEndian.Uint64(ends[8:])
	if hi <= lo || hi-lo > maxFields || hi > uint64(s.fields.size()/fieldSize) {
		return nil, damaged
	}
	index := make([]byte, (hi-lo)*fieldSize)
	if err := s.fields.read(index, int64(lo)*fieldSize); err != nil {
		return nil, err
	}
	fields := make(map[string][]byte, hi-lo)
	for ; len(index) > 0; index = index[fieldSize:] {
		from, size := binary.LittleEndian.Uint64(index), binary.LittleEndian.Uint64(index[8:])
		name := binary.LittleEndian.Uint32(index[16:])
		if int(name) >= len(s.names) || size > maxDocument || from > math.MaxInt64-maxDocument {
			return nil, damaged
		}
		value := make([]byte, size)
		if err := s.stored.read(value, int64(from)); err != nil {
			return nil, err
		}
		fields[s.names[name]] = value
	}
	return fields, nil
}

// Data returns the data set whose sample i is what decode makes of the fields of sample i. decode must make the same of the same,
// and may draw from the Rand of its [trainer.Sample]; its error is one of the sample. version is any text that changes when
// decode does: it is part of the data's fingerprint, by which workers notice that they decode in another way.
func (s *Shards) Data(version string, decode func(fields map[string][]byte, s trainer.Sample, in, target trainer.Tensor) error) trainer.Dataset {
	return &decoded{shards: s, version: version, decode: decode}
}

// Texts returns the corpus whose documents are one field of each sample. Samples without it do not count.
func (s *Shards) Texts(field string) *Corpus {
	c := &Corpus{how: fmt.Sprintf("tar %q\n%s", field, s.key)}
	c.files = []find.File{{Path: s.stored.files[0].path, Size: s.stored.files[0].size}}
	c.read = func(_ string, document func([]byte) error) error {
		for i := range s.n {
			fields, err := s.Read(i)
			if err != nil {
				return err
			}
			if text, ok := fields[field]; ok {
				if err := document(text); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return c
}

// decoded is a data set of decoded samples.
type decoded struct {
	shards  *Shards
	version string
	decode  func(fields map[string][]byte, s trainer.Sample, in, target trainer.Tensor) error
	files   []trainer.DataFile
}

// Bind implements [trainer.Binder].
func (d *decoded) Bind(_, _ trainer.Spec) (trainer.Dataset, error) {
	files, err := d.shards.stored.manifest()
	if err != nil {
		return nil, err
	}
	b := *d
	b.files = append(files[:len(files):len(files)], recipe("index %s, decoded by %q", d.shards.sum, d.version))
	return &b, nil
}

func (d *decoded) Len() int { return d.shards.n }

func (d *decoded) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	fields, err := d.shards.Read(s.Index)
	if err != nil {
		return err
	}
	return d.decode(fields, s, in, target)
}

func (d *decoded) Manifest() []trainer.DataFile { return d.files }
