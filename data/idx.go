package data

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Images is a data set of images of one size with a label each, as MNIST and its successors have them; see [IDX].
type Images struct {
	images, labels *content
	n, size        int
	shape          string
}

// IDX returns the images in one file and their labels in another, both in the idx format of MNIST with numbers of one byte, plain or
// compressed. A model has float32 inputs with as many numbers as an image, of any shape, which are 0 to 1, and one int32 target.
// Errors are of type [*trainer.DataError].
func IDX(images, labels string) (*Images, error) {
	x, dims, err := readIDX(images, 2, 3, 4)
	if err != nil {
		return nil, err
	}
	y, counts, err := readIDX(labels, 1)
	if err != nil {
		return nil, err
	}
	if dims[0] != counts[0] {
		return nil, &trainer.DataError{Path: labels, Reason: fmt.Sprintf("has %d labels for the %d images of %s", counts[0], dims[0], images)}
	}
	if dims[0] == 0 {
		return nil, &trainer.DataError{Path: images, Reason: "has no images"}
	}
	return &Images{x, y, int(dims[0]), int(x.size() / dims[0]), fmt.Sprint(dims[1:])}, nil
}

// readIDX reads the header of a file, which has one of these numbers of dimensions, and has it skipped.
func readIDX(path string, ranks ...int) (*content, []int64, error) {
	fail := func(format string, args ...any) (*content, []int64, error) {
		return nil, nil, &trainer.DataError{Path: path, Reason: fmt.Sprintf(format, args...)}
	}
	c, err := contentOf([]string{path})
	if err != nil {
		return nil, nil, err
	}
	if len(c.files) != 1 {
		return fail("is %d files; name one", len(c.files))
	}
	f := &c.files[0]
	file, err := os.Open(f.path)
	if err != nil {
		return fail("%s", find.Cause(err))
	}
	defer file.Close()
	var head [4 + 4*4]byte
	n, _ := file.ReadAt(head[:], 0)
	rank := int(head[3])
	ok := false
	for _, r := range ranks {
		ok = ok || r == rank
	}
	if n < 4 || head[0] != 0 || head[1] != 0 || head[2] != 8 || !ok || n < 4+4*rank {
		return fail("is no idx file of bytes with %v dimensions", ranks)
	}
	size, dims := int64(1), make([]int64, rank)
	for i := range dims {
		dims[i] = int64(binary.BigEndian.Uint32(head[4+4*i:]))
		if dims[i] == 0 && i > 0 || dims[i] > 0 && size > math.MaxInt64/dims[i] {
			return fail("has the dimensions %v", dims)
		}
		size *= dims[i]
	}
	if f.skip = int64(4 + 4*rank); f.size-f.skip != size {
		return fail("has %d bytes of data, and its header says %d", f.size-f.skip, size)
	}
	return newContent(c.files), dims, nil
}

// Len returns 0: see [Images.Bind].
func (x *Images) Len() int { return 0 }

// Sample fails: see [Images.Bind].
func (x *Images) Sample(trainer.Sample, trainer.Tensor, trainer.Tensor) error { return errUnbound }

// Bind implements [trainer.Binder].
func (x *Images) Bind(in, target trainer.Spec) (trainer.Dataset, error) {
	if in.Kind != trainer.Float32 || in.Len() != x.size || target.Kind != trainer.Int32 || target.Len() != 1 {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("images of %s are for models with a float32 input of %d numbers and one int32 target; this one's are %v and %v", x.shape, x.size, in, target)}
	}
	images, err := x.images.manifest()
	if err != nil {
		return nil, err
	}
	labels, err := x.labels.manifest()
	if err != nil {
		return nil, err
	}
	return &boundImages{x, make([]byte, x.size), append(images, labels...)}, nil
}

// shades are the values of pixels. To look one up is faster than to divide.
var shades = func() (all [256]float32) {
	for v := range all {
		all[v] = float32(v) / 255
	}
	return all
}()

type boundImages struct {
	*Images
	buf   []byte
	files []trainer.DataFile
}

func (b *boundImages) Len() int { return b.n }

func (b *boundImages) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	var label [1]byte
	if err := b.labels.read(label[:], int64(s.Index)); err != nil {
		return err
	}
	if err := b.images.read(b.buf, int64(s.Index)*int64(b.size)); err != nil {
		return err
	}
	pixels := in.F[:len(b.buf)]
	for i, v := range b.buf {
		pixels[i] = shades[v]
	}
	target.I[0] = int32(label[0])
	return nil
}

func (b *boundImages) Manifest() []trainer.DataFile { return b.files }
