package data

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Numpy returns the tokens in .npy files, in path order: arrays of one dimension, all of one type, as numpy.save writes them.
func Numpy(patterns ...string) (*Stream, error) {
	c, err := contentOf(patterns)
	if err != nil {
		return nil, err
	}
	var kind Type
	for i := range c.files {
		f := &c.files[i]
		t, err := readNumpy(f)
		if err != nil {
			return nil, err
		}
		if i > 0 && t != kind {
			return nil, &trainer.DataError{Path: f.shown(), Reason: fmt.Sprintf("holds another type than %s", c.files[0].shown())}
		}
		kind = t
	}
	return newStream(newContent(c.files), kind)
}

// numpyTypes are the types of arrays that hold tokens.
var numpyTypes = map[string]Type{"|u1": Uint8, "<u2": Uint16, "<u4": Uint32, "<i4": Int32, "<i8": Int64, "<u8": Int64}

var (
	numpyType    = regexp.MustCompile(`'descr': *'([^']*)'`)
	numpyFortran = regexp.MustCompile(`'fortran_order': *False`)
	numpyShape   = regexp.MustCompile(`'shape': *\((\d+),? *\)`)
)

// maxNumpyHeader bounds the description of an array.
const maxNumpyHeader = 1 << 16

// readNumpy reads the header of a file and has it skipped.
func readNumpy(f *part) (Type, error) {
	fault := func(format string, args ...any) (Type, error) {
		return 0, &trainer.DataError{Path: f.shown(), Reason: fmt.Sprintf(format, args...)}
	}
	file, err := os.Open(f.path)
	if err != nil {
		return fault("%s", find.Cause(err))
	}
	defer file.Close()
	b := make([]byte, min(f.size, maxNumpyHeader))
	if _, err := file.ReadAt(b, 0); err != nil {
		return fault("%s", find.Cause(err))
	}
	if len(b) < 12 || string(b[:6]) != "\x93NUMPY" || b[6] < 1 || b[6] > 3 {
		return fault("is no .npy file of version 1 to 3")
	}
	began, n := 10, int(binary.LittleEndian.Uint16(b[8:]))
	if b[6] > 1 {
		began, n = 12, int(min(binary.LittleEndian.Uint32(b[8:]), math.MaxInt32))
	}
	if n > len(b)-began {
		return fault("ends within its header, or the header is longer than %d bytes", maxNumpyHeader)
	}
	header := strings.TrimSpace(string(b[began : began+n]))
	descr, shape := numpyType.FindStringSubmatch(header), numpyShape.FindStringSubmatch(header)
	if descr == nil || shape == nil {
		return fault("is no array of one dimension: %.200q", header)
	}
	t, ok := numpyTypes[descr[1]]
	if !ok {
		return fault("holds %.40q; tokens are u1, u2, u4, u8, i4 or i8, little-endian", descr[1])
	}
	if !numpyFortran.MatchString(header) {
		return fault("is not in C order, or does not say so: %.200q", header)
	}
	f.skip = int64(began + n)
	if want, err := strconv.ParseInt(shape[1], 10, 64); err != nil || want != (f.size-f.skip)/t.width() || (f.size-f.skip)%t.width() != 0 {
		return fault("has %d bytes of data for %s elements of %d bytes", f.size-f.skip, shape[1], t.width())
	}
	return t, nil
}
