// Package parquet reads the documents in Parquet files, for [data.Tokenize]. It is a package of its own so that programs that read no
// Parquet do not carry its library.
//
//	web, err := parquet.Text("text", "web/*.parquet")
//	tokens, err := data.Tokenize(tokenizer, "<|endoftext|>", web)
package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/parquet-go/parquet-go"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Text returns the corpus whose documents are the values of a column of strings or bytes, by its dotted path, in the rows of the files in
// path order. Rows without a value do not count. One page of the column is in memory at a time. Patterns are as for [trainer.Text].
func Text(column string, patterns ...string) (*data.Corpus, error) {
	return data.Documents(fmt.Sprintf("parquet %q", column), func(path string, document func([]byte) error) error {
		return read(path, column, document)
	}, patterns...)
}

// maxFooter bounds the description of a file.
const maxFooter = 256 << 20

func read(path, column string, document func([]byte) error) (err error) {
	fail := func(format string, args ...any) error {
		return &trainer.DataError{Path: path, Reason: fmt.Sprintf(format, args...)}
	}
	var given error // by document
	defer func() {
		if v := recover(); v != nil {
			err = fail("is damaged: %v", v) // the library panics on some files
		}
		if given != nil {
			err = given
		}
	}()
	f, err := os.Open(path)
	if err != nil {
		return fail("%s", find.Cause(err))
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fail("%s", find.Cause(err))
	}
	var end [8]byte
	if _, err := f.ReadAt(end[:], st.Size()-8); err != nil || string(end[4:]) != "PAR1" {
		return fail("is no Parquet file")
	}
	if n := int64(binary.LittleEndian.Uint32(end[:])); n > min(maxFooter, st.Size()-12) {
		return fail("has a footer of %d bytes", n)
	}
	file, err := parquet.OpenFile(f, st.Size(), parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return fail("%v", err)
	}
	leaf, ok := file.Schema().Lookup(strings.Split(column, ".")...)
	switch {
	case !ok:
		return fail("has no column %q", column)
	case leaf.Node.Type().Kind() != parquet.ByteArray || leaf.MaxRepetitionLevel > 0:
		return fail("column %q is %v; documents are strings or bytes, one in a row", column, leaf.Node)
	}
	values := make([]parquet.Value, 256)
	for _, group := range file.RowGroups() {
		chunks := group.ColumnChunks()
		if leaf.ColumnIndex >= len(chunks) {
			return fail("is damaged: a row group has %d columns", len(chunks))
		}
		err := func() error {
			pages := chunks[leaf.ColumnIndex].Pages()
			defer pages.Close()
			for {
				page, err := pages.ReadPage()
				if errors.Is(err, io.EOF) {
					return nil
				}
				if err != nil {
					return fail("%v", err)
				}
				for r := page.Values(); ; {
					n, err := r.ReadValues(values)
					for _, v := range values[:n] {
						if v.IsNull() {
							continue
						}
						if given = document(v.ByteArray()); given != nil {
							return given
						}
					}
					if errors.Is(err, io.EOF) {
						break
					}
					if err != nil || n == 0 {
						return fail("is damaged: %v", err)
					}
				}
				parquet.Release(page)
			}
		}()
		if err != nil {
			return err
		}
	}
	return nil
}
