package view

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Clean returns text as a terminal may show it. Programs write some of it, so what could control the terminal or change
// the direction of other text is written as an escape sequence of JSON, such as \u001b, and a byte that is no UTF-8 as \xff.
// Line ends and tabs stay.
func Clean(text string) string {
	clean := func(r rune, size int) bool {
		return r == '\n' || r == '\t' || strconv.IsGraphic(r) && (r != utf8.RuneError || size > 1)
	}
	at := 0
	for at < len(text) {
		r, size := utf8.DecodeRuneInString(text[at:])
		if !clean(r, size) {
			break
		}
		at += size
	}
	if at == len(text) {
		return text
	}
	var b strings.Builder
	b.WriteString(text[:at])
	for at < len(text) {
		switch r, size := utf8.DecodeRuneInString(text[at:]); {
		case strings.HasPrefix(text[at:], "\r\n"): // ends a line, too
			at++
			continue
		case clean(r, size):
			b.WriteString(text[at : at+size])
			at += size
		case r == utf8.RuneError && size <= 1:
			fmt.Fprintf(&b, `\x%02x`, text[at])
			at++
		case r > 0xffff:
			r -= 0x10000
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
			at += size
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
			at += size
		}
	}
	return b.String()
}

// cleaned returns an event all of whose texts are clean.
func cleaned(e Event) Event {
	v := reflect.New(reflect.TypeOf(e)).Elem()
	v.Set(reflect.ValueOf(e))
	cleanAll(v)
	return v.Interface().(Event)
}

// cleanAll cleans the texts in a value that can be set. It changes copies of what others may refer to.
func cleanAll(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		if old := v.String(); Clean(old) != old {
			v.SetString(Clean(old))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() {
				cleanAll(f)
			}
		}
	case reflect.Slice:
		if kind := v.Type().Elem().Kind(); v.Len() == 0 || kind != reflect.String && kind != reflect.Struct {
			return
		}
		own := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(own, v)
		for i := range own.Len() {
			cleanAll(own.Index(i))
		}
		v.Set(own)
	case reflect.Pointer:
		if v.IsNil() || v.Type().Elem().Kind() != reflect.Struct {
			return
		}
		own := reflect.New(v.Type().Elem())
		own.Elem().Set(v.Elem())
		cleanAll(own.Elem())
		v.Set(own)
	}
}
